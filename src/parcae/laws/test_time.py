"""Test-time curves: how the loss of one trained model falls with T, in four forms.

Each form is fitted to each curve by least squares on log loss, from many starts; all starts of all
curves with the same T are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parcae.laws.fit import objective, random_starts
from parcae.laws.forms import EXPONENTIAL, TEST_TIME, Law
from parcae.laws.lbfgs import Tolerance, minimise
from parcae.laws.objective import huber
from parcae.laws.points import Points

STARTS = 12
"""For each curve; three parameters need no more (`tests/laws/test_test_time.py` tries 200)."""
FEWEST = max(len(law.parameters) for law in TEST_TIME) + 1
ROUGH = Tolerance(slope=1e-3, decrease=1e-6, rounds=150)
FINE = Tolerance(slope=1e-8, decrease=1e-12, rounds=200, measured=(0, 20, 40, 80))
FLAT = 1e-6
"""A curve whose losses differ by less, relatively, says nothing about its form."""


@dataclass(frozen=True)
class CurveFit:
    law: Law
    curve: Points
    """What it was fitted to: losses of one run by T."""
    values: dict[str, float]

    def predict(self, test_loops: np.ndarray | float) -> np.ndarray:
        where = np.atleast_1d(np.asarray(test_loops, dtype=float))
        ones = np.ones_like(where)
        at = Points(ones, ones, ones, where, ones, ones)
        return self.law.predict(self.values, at)

    def huber(self, judged: Points) -> float:
        """Mean over the points."""
        return float(huber(np.log(self.predict(judged.test_loops) / judged.loss)).mean())


def fit_curves(law: Law, curves: Sequence[Points], seed: int = 0) -> list[CurveFit]:
    """One fit for each curve, in order."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for place, curve in enumerate(curves):
        groups.setdefault(tuple(curve.test_loops), []).append(place)
    found: dict[int, CurveFit] = {}
    for places in groups.values():
        together = _fit_group(law, [curves[place] for place in places], seed)
        found.update(zip(places, together, strict=True))
    return [found[place] for place in range(len(curves))]


def _fit_group(law: Law, curves: list[Points], seed: int) -> list[CurveFit]:
    rng = np.random.default_rng(seed)
    starts = np.concatenate(
        [random_starts(objective(law, curve, math.inf), STARTS, rng) for curve in curves], 1
    )
    targets = np.log(np.stack([curve.loss for curve in curves]))
    every = np.repeat(targets, STARTS, axis=0)
    problem = objective(law, curves[0], math.inf, log_losses=every)
    rough = minimise(problem, starts, ROUGH)
    best = rough.values.reshape(len(curves), STARTS).argmin(1) + STARTS * np.arange(len(curves))
    fine = minimise(problem.take(best), rough.theta[:, best], FINE)
    values = law.values(problem.bound.to_plain(fine.theta))
    return [
        CurveFit(law, curve, {name: float(column[row]) for name, column in values.items()})
        for row, curve in enumerate(curves)
    ]


@dataclass(frozen=True)
class FormScore:
    """Average Huber loss of a form over all curves, where it was fitted and beyond."""

    law: Law
    inside: float
    curves: int
    beyond: float | None
    """Fitted on T <= mu, judged on T > mu; None where no curve has enough of both."""
    curves_beyond: int


def compare_forms(curves: Sequence[Points]) -> tuple[list[FormScore], list[CurveFit]]:
    """The scores of all forms, and the fits of the exponential one."""
    scores, exponential = [], []
    split = [(curve, curve.test_loops <= curve.mean_loops) for curve in curves]
    split = [(c, near) for c, near in split if near.sum() >= FEWEST and not near.all()]
    for law in TEST_TIME:
        whole = fit_curves(law, curves)
        exponential = whole if law is EXPONENTIAL else exponential
        inside = [one.huber(one.curve) for one in whole]
        shallow = fit_curves(law, [curve.take(near) for curve, near in split])
        beyond = [
            one.huber(curve.take(~near)) for one, (curve, near) in zip(shallow, split, strict=True)
        ]
        scores.append(
            FormScore(
                law=law,
                inside=float(np.mean(inside)),
                curves=len(inside),
                beyond=float(np.mean(beyond)) if beyond else None,
                curves_beyond=len(beyond),
            )
        )
    return scores, exponential


@dataclass(frozen=True)
class Recovery:
    """How far the floor of each curve is from its loss at T = mu: mean and largest share."""

    mean: float
    largest: float
    curves: int


def recovery(fits: Sequence[CurveFit]) -> Recovery | None:
    shares = []
    for one in fits:
        at_mu = one.curve.test_loops == np.round(one.curve.mean_loops)
        if at_mu.any() and one.law is EXPONENTIAL:
            shares.append(abs(one.values["L_inf"] / float(one.curve.loss[at_mu][0]) - 1))
    if not shares:
        return None
    return Recovery(float(np.mean(shares)), float(np.max(shares)), len(shares))


def usable(curves: Sequence[Points]) -> tuple[list[Points], list[str]]:
    """Curves that can be fitted, and words about the others."""
    kept, said, harmed = [], [], []
    for curve in curves:
        name = f"the curve of mean_loops {curve.mean_loops[0]:g}, {curve.tokens[0]:.3g} tokens"
        if np.ptp(curve.loss) < FLAT * curve.loss.mean():
            said.append(f"test-time: {name} does not change with T and is left out.")
            continue
        if curve.loss[-1] > curve.loss[0]:
            harmed.append(float(curve.mean_loops[0]))
        kept.append(curve)
    if harmed:
        depths = ", ".join(f"{one:g}" for one in sorted(set(harmed)))
        said.append(
            f"test-time: {len(harmed)} of {len(curves)} curves (mean_loops {depths}) end above "
            "where they began: more loops harm these models."
        )
    return kept, said
