"""Timing on a noisy machine: interleave the candidates, compare minima and medians in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(
    candidates: Mapping[str, Callable[[], object]], repetitions: int
) -> dict[str, list[float]]:
    """Seconds per run, A B A B ...; one round to warm up is not counted."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def minimum(times: list[float]) -> float:
    return min(times)


def median(times: list[float]) -> float:
    return statistics.median(times)


class GemmRate:
    """The machine's own best rate of matrix products, sampled whenever asked."""

    SHAPES = ((2048, 2048, 2048), (4096, 1024, 1024), (4096, 256, 1024))

    def __init__(self) -> None:
        self.best = 0.0
        self.pairs = [(torch.randn(m, k), torch.randn(k, n)) for m, k, n in self.SHAPES]

    def sample(self) -> None:
        for (m, k, n), (a, b) in zip(self.SHAPES, self.pairs, strict=True):
            start = time.perf_counter()
            torch.mm(a, b)
            self.best = max(self.best, 2 * m * k * n / (time.perf_counter() - start))
