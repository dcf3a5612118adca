"""Loss against test-time loops T: curves of single runs, and the unified law on held-out runs.

Each test-time form is fitted to each curve by least squares on log loss, from many starts; all
starts of all curves with the same T are one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parcae.console import format_count, format_items
from parcae.laws.bootstrap import Estimate, LawResult, estimate, relative_errors
from parcae.laws.forms import EXPONENTIAL, TEST_TIME, UNIFIED, Law
from parcae.laws.isoflop import training_part
from parcae.laws.lbfgs import minimise
from parcae.laws.model_runs import ModelRuns, Points
from parcae.laws.optimise import CURVES, CURVES_POLISH, LawFit, Objective, huber, random_starts
from parcae.laws.table import SETS, FitError

STARTS = 12
"""Random starts per curve; enough for three parameters (`tests/laws/test_loop_curves.py`)."""
MIN_POINTS = max(len(law.parameters) for law in TEST_TIME) + 1
FORMS_SETS = ("curve", "grid", "end-to-end")
RECOVERY_SETS = ("grid", "curve", "end-to-end")
"""The first of these sets with curves is used: the paper compares forms on runs of fixed data, and
measures the recovery of L_inf on the isoFLOP grid."""
FLAT_CURVE = 1e-6
"""Relative range of losses below which a curve does not determine a form."""


@dataclass(frozen=True)
class CurveFit:
    """One form fitted to the losses of one run by T."""

    law: Law
    curve: Points
    values: dict[str, float]

    def predict(self, test_loops: np.ndarray | float) -> np.ndarray:
        where = np.atleast_1d(np.asarray(test_loops, dtype=float))
        ones = np.ones_like(where)
        at = Points(ones, ones, ones, where, ones, ones)
        return self.law.predict(self.values, at)

    def huber(self, points: Points) -> float:
        """Mean Huber loss at these points."""
        return float(huber(np.log(self.predict(points.test_loops) / points.loss)).mean())


def fit_curves(law: Law, curves: Sequence[Points], seed: int = 0) -> list[CurveFit]:
    """Fit one form to each curve; results are in the order of the curves."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, curve in enumerate(curves):
        groups.setdefault(tuple(curve.test_loops), []).append(index)
    fits: dict[int, CurveFit] = {}
    for indices in groups.values():
        group = _fit_group(law, [curves[index] for index in indices], seed)
        fits.update(zip(indices, group, strict=True))
    return [fits[index] for index in range(len(curves))]


def _fit_group(law: Law, curves: list[Points], seed: int) -> list[CurveFit]:
    rng = np.random.default_rng(seed)
    starts = np.concatenate(
        [random_starts(Objective(law, curve, delta=np.inf), STARTS, rng) for curve in curves], 1
    )
    targets = np.log(np.stack([curve.loss for curve in curves]))
    every = np.repeat(targets, STARTS, axis=0)
    objective = Objective(law, curves[0], delta=np.inf, log_losses=every)
    ended = minimise(objective, starts, CURVES)
    best = ended.values.reshape(len(curves), STARTS).argmin(1) + STARTS * np.arange(len(curves))
    polished = minimise(objective.take(best), ended.theta[:, best], CURVES_POLISH)
    values = law.values(objective.bound.to_plain(polished.theta))
    return [
        CurveFit(law, curve, {name: float(column[row]) for name, column in values.items()})
        for row, curve in enumerate(curves)
    ]


@dataclass(frozen=True)
class FormScore:
    """Average Huber loss of a form over all curves."""

    law: Law
    inside: float
    """At the T it was fitted to."""
    curves: int
    beyond: float | None
    """At T > mu, fitted to T <= mu; None if no curve has enough of both."""
    curves_beyond: int


def compare_forms(curves: Sequence[Points]) -> list[FormScore]:
    """The scores of all forms over these curves."""
    scores = []
    split = [(curve, curve.test_loops <= curve.mean_loops) for curve in curves]
    split = [(c, near) for c, near in split if near.sum() >= MIN_POINTS and not near.all()]
    for law in TEST_TIME:
        inside = [fit.huber(fit.curve) for fit in fit_curves(law, curves)]
        shallow = fit_curves(law, [curve.take(near) for curve, near in split])
        beyond = [
            fit.huber(curve.take(~near)) for fit, (curve, near) in zip(shallow, split, strict=True)
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
    return scores


@dataclass(frozen=True)
class Recovery:
    """Relative difference between the floor of a curve and its loss at T = mu."""

    mean: float
    largest: float
    curves: int


def recovery(fits: Sequence[CurveFit]) -> Recovery | None:
    """The mean and largest difference over all curves; None if there are none."""
    shares = []
    for fit in fits:
        at_mu = fit.curve.test_loops == np.round(fit.curve.mean_loops)
        if at_mu.any() and fit.law is EXPONENTIAL:
            shares.append(abs(fit.values["L_inf"] / float(fit.curve.loss[at_mu][0]) - 1))
    if not shares:
        return None
    return Recovery(float(np.mean(shares)), float(np.max(shares)), len(shares))


def usable_curves(curves: Sequence[Points]) -> tuple[list[Points], list[str]]:
    """The curves that can be fitted, and warnings about the others and about rising ones."""
    kept, messages, rising = [], [], []
    for curve in curves:
        tokens = format_count(curve.tokens[0])
        name = f"the curve of mean_loops {curve.mean_loops[0]:g}, {tokens} tokens"
        if np.ptp(curve.loss) < FLAT_CURVE * curve.loss.mean():
            messages.append(f"test-time: {name} does not change with T and is not used.")
            continue
        if curve.loss[-1] > curve.loss[0]:
            rising.append(float(curve.mean_loops[0]))
        kept.append(curve)
    if rising:
        depths = ", ".join(f"{loops:g}" for loops in sorted(set(rising)))
        messages.append(
            f"test-time: more loops make models worse: {len(rising)} of "
            f"{format_items(len(curves), 'curve')} (mean_loops {depths}) end higher at the largest "
            "T than at the smallest."
        )
    return kept, messages


@dataclass(frozen=True)
class TestTimeFits:
    """The curves of loss against T of one model, on the sets of runs that the paper uses."""

    __test__ = False  # not a test, despite its name
    fits: dict[str, list[CurveFit]]
    """By set: exponential fits of its curves."""
    forms: list[FormScore]
    forms_set: str
    """The set that the forms are compared on: runs of fixed data (`curve`) where there are any."""
    recovery: Recovery | None
    recovery_set: str
    """The set that recovery is measured on: the grid where it has curves."""

    def to_json(self) -> dict[str, Any]:
        """For fit.json; the fits by set, mean_loops and tokens."""
        fits = [(name, fit) for name, listed in self.fits.items() for fit in listed]
        return {
            "forms": self.forms,
            "forms_set": self.forms_set,
            "recovery": self.recovery,
            "recovery_set": self.recovery_set,
            "curves": [
                {
                    "set": name,
                    "mean_loops": float(fit.curve.mean_loops[0]),
                    "tokens": float(fit.curve.tokens[0]),
                    "values": fit.values,
                }
                for name, fit in fits
            ],
        }


def analyse_curves(runs: ModelRuns) -> tuple[TestTimeFits, list[str]]:
    """Fit all curves of a model, and warnings. FitError if no run has a curve."""
    curves = {name: runs.curves(runs.in_set(name), MIN_POINTS) for name in SETS}
    if not any(curves.values()):
        raise FitError(
            f"{runs.model}: no run was measured at {MIN_POINTS} or more test_loops, "
            "which a curve of three parameters needs. Measure runs at "
            f"{MIN_POINTS} or more numbers of test loops."
        )
    _, messages = usable_curves([curve for listed in curves.values() for curve in listed])
    kept = {name: usable_curves(listed)[0] for name, listed in curves.items()}
    kept = {name: listed for name, listed in kept.items() if listed}
    if not kept:
        raise FitError(f"{runs.model}: no curve changes with T. Check how losses were measured.")
    fits = {name: fit_curves(EXPONENTIAL, listed) for name, listed in kept.items()}
    forms_set = next(name for name in FORMS_SETS if name in kept)
    recovery_set = next(name for name in RECOVERY_SETS if name in kept)
    result = TestTimeFits(
        fits=fits,
        forms=compare_forms(kept[forms_set]),
        forms_set=forms_set,
        recovery=recovery(fits[recovery_set]),
        recovery_set=recovery_set,
    )
    return result, messages


@dataclass(frozen=True)
class Conditioning:
    """One way in which the decay with T depends on mu: total Huber losses, as in the paper."""

    formula: str
    grid: float
    """All parameters fitted together."""
    grid_frozen: float
    """Training law frozen; only Z, z (and gamma) fitted."""
    held_out: float | None
    """At the end-to-end models; None if there are none."""
    held_out_frozen: float | None
    gamma: float | None


def conditioning(joint: LawFit, frozen: LawFit, end_to_end: Sequence[Points]) -> Conditioning:
    """Compare a unified law fitted jointly and with the training law frozen."""

    def total(fit: LawFit) -> float | None:
        if not end_to_end:
            return None
        return float(
            sum(huber(np.log(fit.predict(curve) / curve.loss)).sum() for curve in end_to_end)
        )

    return Conditioning(
        formula=joint.law.formula.split(" + ")[-1],
        grid=joint.objective,
        grid_frozen=frozen.objective,
        held_out=total(joint),
        held_out_frozen=total(frozen),
        gamma=joint.values.get("gamma"),
    )


@dataclass(frozen=True)
class HeldOut:
    """Measured and predicted loss of a run that no law was fitted to."""

    set: str
    mean_loops: float
    tokens: float
    measured: float
    predicted: Estimate
    """At T = mu, by the training law."""
    error: float
    """Relative."""
    curve_error: float | None
    """Mean relative error of the unified law over T; None for runs with one T."""
    oracle_error: float | None
    """The same with the measured loss at T = mu in place of the training law."""


def predict_held_out(
    runs: ModelRuns, training: LawResult, unified: LawResult | None
) -> list[HeldOut]:
    """Compare the laws with the held-out runs that were measured at T = mu."""
    rows = []
    named = [
        (name, curve)
        for name in SETS
        for curve in runs.curves(runs.held_out() & runs.in_set(name), 1)
    ]
    for name, curve in named:
        at_mu = curve.test_loops == np.round(curve.mean_loops)
        if not at_mu.any():
            continue
        nominal = curve.take(at_mu)
        loss = estimate(
            training,
            lambda v, at=nominal: np.atleast_2d(training.law.predict(training_part(v), at))[:, 0],
        )
        measured = float(nominal.loss[0])
        curve_error = oracle_error = None
        if unified is not None and len(curve) > 1:
            predicted = unified.law.predict(unified.values, curve)
            curve_error = float(relative_errors(predicted, curve.loss).mean())
            oracle = oracle_curve(unified, measured, curve)
            oracle_error = float(relative_errors(oracle, curve.loss).mean())
        rows.append(
            HeldOut(
                set=name,
                mean_loops=float(curve.mean_loops[0]),
                tokens=float(curve.tokens[0]),
                measured=measured,
                predicted=loss,
                error=abs(loss.value / measured - 1),
                curve_error=curve_error,
                oracle_error=oracle_error,
            )
        )
    return rows


def oracle_curve(unified: LawResult, loss_at_mu: float, curve: Points) -> np.ndarray:
    """The decay of the unified law on top of the measured loss at T = mu."""
    floor = UNIFIED.predict({**unified.values, "Z": 1e-300}, curve)
    return loss_at_mu + unified.law.predict(unified.values, curve) - floor
