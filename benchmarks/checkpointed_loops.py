"""What checkpointing the loop costs in time: a training step with and without, taking turns.

    python benchmarks/checkpointed_loops.py [--repetitions 7]

parcae-10m, 16 rows of 128 tokens, 12 loops of which 4 or 12 have gradient; forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import parcae
from parcae.machine import keep_freed_memory
from parcae.model.base import LanguageModel

ROWS, LENGTH, LOOPS = 16, 128, 12


def model(grad_loops: int, checkpointed: bool) -> LanguageModel:
    loop = {"mean_loops": LOOPS, "backprop_loops": grad_loops, "sampler": "fixed"}
    created = parcae.create("parcae-10m", loop=loop)
    if checkpointed:
        created.checkpoint_loops()
    return created


def seconds(model: LanguageModel, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    loss = model(tokens, tokens).loss
    assert loss is not None
    loss.backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args().repetitions
    keep_freed_memory()
    tokens = torch.randint(4096, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for grad_loops in (4, 12):
        pair = {checkpointed: model(grad_loops, checkpointed) for checkpointed in (False, True)}
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
