"""What the machine could do at best, to say what share of it a run reaches."""

from __future__ import annotations

import time

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


def peak_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float | None:
    """FLOP/s of the data sheet, or the best matrix products that the CPU shows in a moment."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = [peak for part, peak in PEAKS.items() if part in name]
        return found[0] if found and dtype == torch.bfloat16 else None
    if device.type != "cpu":
        return None
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    best, end = 0.0, time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end:
        torch.mm(a, b)
        best = max(best, 2 * SIZE**3 / (time.perf_counter() - start))
    return best
