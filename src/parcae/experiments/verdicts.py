"""Rules that turn numbers and their spread over seeds into a verdict.

A claim is stated before its runs are trained, and judged by one of these functions. A difference is
positive where it agrees with the claim; the interval is Student's 95 % interval of its mean over
seeds, which for three seeds is wide on purpose:

    shown                     the whole interval agrees
    shown weakly              every seed agrees, but the interval includes zero
    not shown at this scale   the seeds disagree, or the effect is absent
    contradicted              the whole interval disagrees

A run that diverged has an infinite loss. A single seed has no spread: it shows weakly at best.
Until all runs of an experiment exist its claims are incomplete; at toy scale there are no verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from parcae.evaluation.metrics import interval

Verdict = Literal[
    "shown",
    "shown weakly",
    "not shown at this scale",
    "contradicted",
    "not run yet",
    "incomplete",
    "toy scale: no verdict",
]
SHOWN: Verdict = "shown"
WEAKLY: Verdict = "shown weakly"
NOT_SHOWN: Verdict = "not shown at this scale"
CONTRADICTED: Verdict = "contradicted"
NOT_RUN: Verdict = "not run yet"
INCOMPLETE: Verdict = "incomplete"
TOY: Verdict = "toy scale: no verdict"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, or one beyond it, with what was found."""

    statement: str
    verdict: Verdict
    evidence: str = ""
    """The numbers behind the verdict, in one sentence."""


def positive(differences: Iterable[float]) -> Verdict:
    """The verdict on differences, one per seed, that a claim expects to be positive."""
    values = list(differences)
    if not values:
        return NOT_RUN
    if any(math.isnan(value) for value in values):
        return NOT_SHOWN
    if len(values) > 1 and all(math.isinf(value) for value in values):
        agree = [value > 0 for value in values]  # one side diverged in every seed
        return SHOWN if all(agree) else NOT_SHOWN if any(agree) else CONTRADICTED
    mean, half = interval(values)
    if mean - half > 0:
        return SHOWN
    if mean + half < 0:
        return CONTRADICTED
    return WEAKLY if all(value > 0 for value in values) else NOT_SHOWN


def differences(larger: Mapping[int, float], smaller: Mapping[int, float]) -> list[float]:
    """`larger` - `smaller` for every seed that both have; runs of a seed see the same batches."""
    pairs = [(larger[seed], smaller[seed]) for seed in sorted({*larger} & {*smaller})]
    return [math.nan if a == b == math.inf else a - b for a, b in pairs]


def lower(smaller: Mapping[int, float], larger: Mapping[int, float], margin: float = 0) -> Verdict:
    """Whether `smaller` lies below `larger` by more than `margin`, both by seed."""
    return positive(value - margin for value in differences(larger, smaller))


def within(values: Iterable[float], limit: float) -> Verdict:
    """Whether values, one per seed, lie in [-limit, limit]."""
    return positive(limit - abs(value) for value in values)


def always(cases: Iterable[bool]) -> Verdict:
    """Whether a rule without a spread held in every case; a quarter of exceptions weakens it."""
    held = list(cases)
    if not held:
        return NOT_RUN
    share = sum(held) / len(held)
    if share == 1:
        return SHOWN if len(held) > 1 else WEAKLY
    return WEAKLY if share >= 0.75 else NOT_SHOWN if share > 0.25 else CONTRADICTED


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict of several parts that should all hold; parts that conflict show nothing."""
    parts = set(verdicts)
    if not parts or NOT_RUN in parts:
        return NOT_RUN
    if len(parts) == 1:
        return parts.pop()
    return WEAKLY if parts == {SHOWN, WEAKLY} else NOT_SHOWN


def describe(values: Iterable[float], digits: int = 3, of: str = "seed") -> str:
    """`0.041 ± 0.012 (3 seeds)`: the mean and half its interval; both values of two seeds.

    `of`: what each value is of, where it is not a seed.
    """
    numbers = list(values)
    if not numbers:
        return "–"
    mean, half = interval(numbers)
    seeds = f"{len(numbers)} {of}" + ("s" if len(numbers) > 1 else "")
    if len(numbers) == 2 and math.isfinite(half):  # Student's interval of two values says nothing
        return f"{', '.join(f'{value:.{digits}f}' for value in numbers)} ({seeds})"
    spread = f" ± {half:.{digits}f}" if math.isfinite(half) else ""
    if math.isinf(mean):
        return f"diverged ({seeds})"
    return "undefined" if math.isnan(mean) else f"{mean:.{digits}f}{spread} ({seeds})"
