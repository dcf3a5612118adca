"""Numbers as they come out of a log, made fit to draw. Pure functions; NaN stands for "none"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

LARGEST = 1e30
"""What lies above this has diverged, and would only break a figure's axis."""


def number(value: Any) -> float:
    """A finite number, or NaN for anything else: null, a missing key, text, infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < LARGEST else math.nan


def numbers(values: Any) -> np.ndarray:
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else ()
    return np.array([number(value) for value in listed], dtype=float)


def column(lines: Iterable[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one key, where both are numbers."""
    pairs = np.array([(number(line.get("step")), number(line.get(key))) for line in lines])
    pairs = pairs.reshape(-1, 2)
    pairs = pairs[~np.isnan(pairs).any(axis=1)]
    return pairs[:, 0], pairs[:, 1]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over `window` values around each: centred, so that a falling curve does not lag.

    Narrower towards the start, where curves are steep; one-sided at the end, where they are flat.
    """
    places = np.arange(len(values))
    half = np.minimum(max(window, 1) // 2, places)
    low, high = places - half, np.minimum(places + half + 1, len(values))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return (sums[high] - sums[low]) / (high - low)


def thin(x: np.ndarray, y: np.ndarray, limit: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points: the lowest and the highest of each stretch, so no spike is lost."""
    if len(x) <= limit:
        return x, y
    kept: set[int] = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), limit // 2 - 1):
        kept |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    places = sorted(kept)
    return x[places], y[places]
