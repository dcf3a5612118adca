"""What benchmarks measure themselves against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class GemmRate:
    """The machine's own best rate of matrix products, sampled whenever asked."""

    SHAPES = ((2048, 2048, 2048), (4096, 1024, 1024), (4096, 256, 1024))

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.best = 0.0
        self.now = now
        self.pairs = [(torch.randn(m, k), torch.randn(k, n)) for m, k, n in self.SHAPES]

    def sample(self) -> None:
        for (m, k, n), (a, b) in zip(self.SHAPES, self.pairs, strict=True):
            start = self.now()
            torch.mm(a, b)
            self.best = max(self.best, 2 * m * k * n / (self.now() - start))
