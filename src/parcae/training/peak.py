"""What the machine could do at best, to say what share of it a run reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
}
"""Dense bfloat16 FLOP/s by the makers' data sheets; the first name that fits counts."""
SIZE = 1024
SECONDS = 0.3
SHARE_OF_TIME = 1e-3
"""Of a run that may be spent on measuring the machine again."""


class Peak:
    """FLOP/s of one device at best, as far as is known by now.

    A CPU's is measured, and one that is busy with something else shows less than it can. So it is
    measured again now and then, and whatever turns out faster, be it a step of training, is the
    peak from then on: no share of it is ever above one.
    """

    def __init__(
        self,
        flops: float | None,
        measure: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.flops, self._measure, self._clock = flops, measure, clock
        self._started = clock()
        self._spent = self._longest = 0.0

    def share(self, rate: float) -> float | None:
        """`rate` as a share of the peak; None where nobody knows one."""
        if self.flops is None:
            return None
        self.flops = max(self.flops, rate)
        if self._measure is not None:
            self._look_again(self._measure)
        return rate / self.flops

    def _look_again(self, measure: Callable[[], float]) -> None:
        """Unless too much time has gone into it already."""
        start = self._clock()
        if self._spent + self._longest < SHARE_OF_TIME * (start - self._started):
            self.flops = max(self.flops or 0.0, measure())
            took = self._clock() - start
            self._spent, self._longest = self._spent + took, max(self._longest, took)


def find_peak(device: torch.device, dtype: torch.dtype = torch.float32) -> Peak:
    product = MatrixProduct() if device.type == "cpu" else None
    return Peak(_at_best(device, dtype, product), product)


def peak_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float | None:
    """FLOP/s of the data sheet, or the best matrix products that the CPU shows in a moment."""
    return find_peak(device, dtype).flops


class MatrixProduct:
    """FLOP/s of one product of square matrices."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._a, self._b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))

    def __call__(self) -> float:
        start = time.perf_counter()
        torch.mm(self._a, self._b)
        return 2 * SIZE**3 / (time.perf_counter() - start)


def _at_best(
    device: torch.device, dtype: torch.dtype, product: MatrixProduct | None
) -> float | None:
    if product is not None:
        best, end = 0.0, time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            best = max(best, product())
        return best
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = [peak for part, peak in PEAKS.items() if part in name]
    return found[0] if found and dtype == torch.bfloat16 else None
