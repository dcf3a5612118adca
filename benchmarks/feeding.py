"""Speed of the loader alone compared with the training speed of the 3M preset, interleaved.

    python benchmarks/feeding.py [--rounds 5] [--no-compile] [--out feeding.json]

A training step is forward, backward and a fused AdamW step on all cores, with the preset's context
and depths. The loader runs on one core in the calling thread and reads a memory-mapped file, for
several median document lengths.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import parcae
from packing import BATCH_ROWS, CONTEXT, interleave, load, mapped_documents, nothing
from parcae.console import out, table
from parcae.files import write_json
from parcae.machine import keep_freed_memory

PRESET = "parcae-3m"
TRAINED_ROWS = 8
LOADED_STEPS = 20
MEDIAN_LENGTHS = (30, 150, 400)


def training_step(compiled: bool) -> Callable[[], None]:
    keep_freed_memory()
    model = parcae.create(PRESET)
    assert model.config.context_length == CONTEXT
    if compiled:
        model.compile_layers()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    size = (2, TRAINED_ROWS, CONTEXT)
    inputs, targets = torch.randint(model.config.vocab_size, size, generator=generator)

    def step() -> None:
        chance = model.draw(0, 0, range(TRAINED_ROWS), CONTEXT)
        model(inputs, targets, **chance).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        loaders = {
            f"loader, median length {median}": partial(
                load, mapped_documents(Path(name), 100_000, median), LOADED_STEPS, 0, nothing
            )
            for median in MEDIAN_LENGTHS
        }
        times = interleave(
            {"training": training_step(not arguments.no_compile), **loaders}, arguments.rounds
        )
    tokens = dict.fromkeys(times, LOADED_STEPS * BATCH_ROWS * CONTEXT)
    tokens["training"] = TRAINED_ROWS * CONTEXT
    speeds = {
        name: {kind: tokens[name] / seconds for kind, seconds in taken.items()}
        for name, taken in times.items()
    }
    trained = speeds["training"]
    rows = [
        (
            name,
            f"{speed['minimum']:,.0f}",
            *(f"{speed[kind] / trained[kind]:,.0f}x" for kind in ("minimum", "median")),
        )
        for name, speed in speeds.items()
    ]
    title = f"{PRESET}, context {CONTEXT}"
    out.print(table(title, ["", "tokens/s", "by minima", "by medians"], rows))
    if arguments.out:
        write_json(arguments.out, {"preset": PRESET, "tokens_per_second": speeds})


if __name__ == "__main__":
    main()
