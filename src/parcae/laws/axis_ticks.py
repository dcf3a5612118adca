"""Numbers along the axes of figures: few, round, and in units a person would say."""

from __future__ import annotations

from typing import Any

import numpy as np

UNITS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def short(value: float) -> str:
    """14,300 -> 14.3 k; 1.12e10 -> 11.2 B."""
    value = float(f"{value:.3g}")  # 999,900 is 1 M, not 1,000 k
    unit, letter = next((pair for pair in UNITS if value >= pair[0]), UNITS[-1])
    return f"{value / unit:.3g}{letter}"


def tokens(axes: Any, low: float, high: float) -> None:
    """Along a logarithmic axis upwards."""
    _along(axes, round_numbers(low, high))


def loops(axes: Any, low: float, high: float) -> None:
    """None below one: fewer loops than that are not possible."""
    _along(axes, round_numbers(max(low, 1.0), max(high, 1.0)))


def _along(axes: Any, shown: list[float]) -> None:
    axes.set_yticks(shown, [short(one) for one in shown])
    axes.minorticks_off()


def round_numbers(low: float, high: float, most: int = 7) -> list[float]:
    """Numbers that are easily read, between two limits on a logarithmic scale."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found: list[float] = []
    for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 4, 7), (1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) <= most:
            break
    return found
