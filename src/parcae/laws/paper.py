"""What the paper publishes about scaling: coefficients, grids, measured models. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping

COEFFICIENTS: Mapping[str, Mapping[str, float]] = {
    "parcae-140m": {"E": 2.662, "X": 522733.307, "x": 0.771, "Y": 25420.102, "y": 0.525},
    "parcae-370m": {"E": 2.439, "X": 832134.346, "x": 0.775, "Y": 6386.865, "y": 0.448},
}
TEST_TIME: Mapping[str, float] = {"Z": 0.85, "z": 7.5}
"""Not printed in the paper: read off its 140M losses 3.28, 2.97, 2.95 at T = 1, 4, 8, mu = 8."""

BUDGETS: Mapping[str, tuple[float, ...]] = {
    "parcae-140m": (1e18, 2e18, 4e18, 8e18, 16e18, 64e18),
    "parcae-370m": (32e18, 64e18, 128e18),
}
LOOPS = (2, 4, 6, 8, 10, 12)
GRID_TEST_LOOPS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
"""Each run of the grid is measured at these T for the unified law."""
CURVE_TEST_LOOPS = tuple(range(1, 25))
CURVE_TOKENS = 11.2e9
"""Test-time curves: mu in LOOPS, all trained on so many tokens."""

TOKENS: Mapping[str, float] = {"140m": 11.2e9, "370m": 29.6e9, "770m": 61.6e9, "1.3b": 104e9}
HELD_OUT_LOOPS = 8
HELD_OUT_TEST_LOOPS = tuple(range(1, 17))

_PERPLEXITY = {
    "parcae": {"140m": 19.06, "370m": 14.49, "770m": 12.49, "1.3b": 11.42},
    "transformer": {"140m": 21.48, "370m": 15.79, "770m": 13.08, "1.3b": 11.95},
}
_CORE = {
    "parcae": {
        "140m": (14.04, 9.67),
        "370m": (20.0, 12.75),
        "770m": (25.07, 15.19),
        "1.3b": (28.44, 17.08),
    },
    "transformer": {
        "140m": (13.0, 8.8),
        "370m": (17.46, 11.71),
        "770m": (22.42, 14.2),
        "1.3b": (25.45, 15.9),
    },
}


def measured_loss(family: str, size: str) -> float:
    """Validation loss of the paper's end-to-end models: `parcae` at T = 8, `transformer`."""
    return math.log(_PERPLEXITY[family][size])


def core_scores(family: str, size: str) -> tuple[float, float]:
    """Core and Core-Extended."""
    return _CORE[family][size]
