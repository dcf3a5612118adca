"""The optimiser step: stacks of matrices against one at a time, and its share of a training step.

    python benchmarks/optimiser.py [--repetitions 10] [--out result.json]

All candidates step the same parameters with the same gradients, taking turns in one process.
"One at a time" is the same Muon given one matrix per parameter group; `torch.optim.Muon` is
PyTorch's own, which has neither variance reduction nor cautious decay and works in bfloat16; AdamW
on every parameter, fused, is what a user would take without Muon.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import parcae
from parcae.machine import keep_freed_memory
from parcae.training.muon import Muon
from parcae.training.optim import Optimiser, assign
from parcae.training.schedule import Factors
from parcae.training.settings import OptimiserConfig

PRESET, ROWS, LENGTH = "parcae-10m", 32, 128


def candidates() -> dict[str, Callable[[], object]]:
    model = parcae.create(PRESET)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(model.config.vocab_size, (2, ROWS, LENGTH), generator=generator)

    def forward_and_backward() -> None:
        model.zero_grad()
        model(*batch).loss.backward()

    forward_and_backward()  # the gradients that all candidates step with
    matrices = [p for _, p in assign(model, "muon-adamw")["muon"]]
    stacked = Muon(matrices)
    single = Muon([{"params": [p]} for p in matrices])
    torchs = torch.optim.Muon(matrices, lr=8e-3)
    whole = Optimiser(model, OptimiserConfig())
    adamw = Optimiser(model, OptimiserConfig(kind="adamw"))
    return {
        "Muon, stacked": stacked.step,
        "Muon, one at a time": single.step,
        "torch.optim.Muon": torchs.step,
        "Muon + AdamW": lambda: whole.step(Factors(lr=1e-3)),
        "AdamW for all": lambda: adamw.step(Factors(lr=1e-3)),
        "forward and backward": forward_and_backward,
    }


def measure(repetitions: int) -> dict[str, dict[str, float]]:
    steps = candidates()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repetition:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    return {
        name: {"minimum": min(taken), "median": statistics.median(taken)}
        for name, taken in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    result = measure(arguments.repetitions)
    print(f"{PRESET}, {torch.get_num_threads()} threads; times relative to Muon, stacked")
    print(f"{'':24}{'by minima':>11}{'by medians':>12}{'of a training step':>20}")
    base, work = result["Muon, stacked"], result["forward and backward"]
    for name, one in result.items():
        share = one["median"] / (one["median"] + work["median"])
        shown = "" if one is work else f"{share:20.1%}"
        ratios = f"{one['minimum'] / base['minimum']:10.2f}x{one['median'] / base['median']:11.2f}x"
        print(f"{name:24}{ratios}{shown}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
