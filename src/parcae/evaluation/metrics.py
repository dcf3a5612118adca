"""The formulas of every score: loss in nats to perplexity and bits per byte, right answers, errors.

`loss` is in nats. Values that do not fit a float are inf; `finite` makes them None for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parcae.evaluation.prompts import Answer

TIE = 1e-6
"""Losses in nats that differ by less are equal: rounding alone makes such differences."""
CONFIDENCE = 0.95
MAX_EXPONENT = 700
"""exp of more overflows float64 (at 709.8)."""


def perplexity(loss: float) -> float:
    """exp(loss) of a loss per token, word or byte; inf where it overflows."""
    return math.exp(loss) if not loss > MAX_EXPONENT else math.inf


def bits_per_byte(nats: float, size: float) -> float:
    """Bits per byte of a text of `size` bytes with the loss `nats` in total."""
    return nats / math.log(2) / size


def sums(answer: Answer) -> list[float]:
    """Loss of the whole span in nats, at each number of loops."""
    return answer.nats.sum(1).tolist()


def means(answer: Answer) -> list[float]:
    """Mean loss per token of the span in nats, at each number of loops."""
    return answer.nats.mean(1).tolist()


def by_loops(columns: Sequence[Sequence[float]]) -> list[list[float]]:
    """[alternatives][loops] -> [loops][alternatives]."""
    return [list(row) for row in zip(*columns, strict=True)]


def credit(losses: Sequence[float], gold: int) -> float:
    """Multiple choice: 1 if alternative `gold` has the lowest loss, 1/k if k alternatives share it,
    else 0."""
    lowest = min(losses)
    best = [index for index, loss in enumerate(losses) if loss <= lowest + TIE]
    return 1 / len(best) if gold in best else 0.0


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def standard_error(numbers: Sequence[float]) -> float | None:
    """Standard error of the mean; None for a single number."""
    count = len(numbers)
    if count < 2:
        return None
    centre = mean(numbers)
    return (sum((x - centre) ** 2 for x in numbers) / (count - 1) / count) ** 0.5


def ratio(values: Sequence[float], sizes: Sequence[int]) -> tuple[float, float | None]:
    """sum(values) / sum(sizes) and its standard error: a long document counts by its length."""
    count, total = len(values), sum(sizes)
    quotient = sum(values) / total
    if count < 2:
        return quotient, None
    squares = sum((v - quotient * s) ** 2 for v, s in zip(values, sizes, strict=True))
    return quotient, (squares * count / (count - 1)) ** 0.5 / total


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of Student's 95 % interval, infinite for a single value."""
    import numpy as np
    from scipy import stats

    numbers = np.asarray(values, dtype=float)
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return float(numbers.mean()), math.inf
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1) * stats.sem(numbers)
    return float(numbers.mean()), float(half)
