"""What checkpointing the loop costs in time and saves in memory: steps with and without.

    python benchmarks/activation_checkpointing.py [--repetitions 7]              time, taking turns
    MALLOC_MMAP_THRESHOLD_=65536 OMP_NUM_THREADS=1 \\
        python benchmarks/activation_checkpointing.py --memory [--preset NAME] [--rows 8]    memory

parcae-10m, 16 rows of 128 tokens, 12 loops of which 4 or 12 have gradient; forward and backward.
The variable returns freed memory to the system at once, so that a peak is that of the tensors. It
is printed as JSON: how, loops with gradient, bytes above the memory before the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import parcae
from parcae.machine import keep_freed_memory
from parcae.model.base import LanguageModel

ROWS, LENGTH, LOOPS = 16, 128, 12


def model(grad_loops: int, checkpointed: bool, preset: str = "parcae-10m") -> LanguageModel:
    loop = {"mean_loops": LOOPS, "backprop_loops": grad_loops, "sampler": "fixed"}
    created = parcae.create(preset, loop=loop)
    if checkpointed:
        created.activation_checkpointing()
    return created


def seconds(model: LanguageModel, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    loss = model(tokens, tokens).loss
    assert loss is not None
    loss.backward()
    return time.perf_counter() - start


def peak_bytes(candidate: LanguageModel, rows: int) -> int:
    """Peak of a step above the memory before it."""
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    seconds(candidate, tokens[:1])  # loads what is loaded late
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # the peak starts again from here
    before = _status("VmRSS")
    seconds(candidate, tokens)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    with open("/proc/self/status") as stream:
        return 1024 * next(int(line.split()[1]) for line in stream if line.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--preset", default="parcae-10m")
    parser.add_argument("--rows", type=int, default=ROWS, help="with --memory")
    arguments = parser.parse_args()
    if arguments.memory:
        preset, rows = arguments.preset, arguments.rows
        taken = [
            [how, loops, peak_bytes(model(loops, how == "checkpointed", preset), rows)]
            for how in ("checkpointed", "plain")
            for loops in (4, 12)
        ]
        print(json.dumps(taken))
        return
    measure_time(arguments.preset, arguments.repetitions)


def measure_time(preset: str, repetitions: int) -> None:
    keep_freed_memory()
    tokens = torch.randint(4096, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for grad_loops in (4, 12):
        pair = {how: model(grad_loops, how, preset) for how in (False, True)}
        taken: dict[bool, list[float]] = {False: [], True: []}
        for repetition in range(repetitions + 1):
            for checkpointed, candidate in pair.items():
                took = seconds(candidate, tokens)
                if repetition:
                    taken[checkpointed].append(took)
        minima = min(taken[True]) / min(taken[False])
        medians = statistics.median(taken[True]) / statistics.median(taken[False])
        ratios = f"{minima:.2f}x by minima, {medians:.2f}x by medians"
        print(f"{grad_loops:2} loops with gradient: {ratios}")


if __name__ == "__main__":
    main()
