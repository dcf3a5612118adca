"""Which source a row comes from, so that shares hold from the first row on.

A random draw would be off by the square root of the number of rows; this sequence is never off by
a whole row: after n rows a source of weight w has given more than n w - 1 and less than n w + 1.
It is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): among
the sources whose next row is due, take the one whose deadline comes first. The arithmetic is in
integers, hence exact after any number of rows, and the rows given so far are all it has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


def exact_weights(weights: Sequence[float]) -> list[int]:
    """Integers in the proportion that the weights spell: 0.7, 0.2, 0.1 -> 7, 2, 1."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def next_sources(weights: Sequence[int], rows_given: Sequence[int], rows: int) -> list[int]:
    """The sources of the next `rows` rows, after each source has given so many."""
    if len(weights) == 1:
        return [0] * rows
    given = list(rows_given)
    total = sum(weights)
    slack = 2 * len(weights) - 2
    start = sum(given)
    chosen = []
    for number in range(start + 1, start + rows + 1):
        first, first_deadline = -1, 0
        for source, weight in enumerate(weights):
            if (weight * number - given[source] * total) * slack < total:
                continue
            deadline = (given[source] + 1) * slack - 1
            if first < 0 or deadline * weights[first] < first_deadline * weight:
                first, first_deadline = source, deadline
        given[first] += 1
        chosen.append(first)
    return chosen
