"""How certain a fit is: bootstrap samples, intervals, goodness of fit, and warnings.

The bootstrap resamples residuals over runs. The design stays fixed, since the grid was chosen and
not drawn; each sample gives every run the error of a run drawn at random, inflated for the
parameters of the fit and for the small number of runs from which the size of errors is known. The
deviations of one run's losses from that common error keep their T and get a random sign.
Resampling runs ("pairs") covered equally well, but leaves some budgets of a small grid almost
empty; resampling single losses would treat ten losses of one run as ten runs.
`docs/scaling-laws.md` has the measured coverage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from parcae.laws.forms import Law
from parcae.laws.lbfgs import minimise
from parcae.laws.model_runs import Points
from parcae.laws.optimise import BOOTSTRAP, LawFit, Objective, Search, StartCounts, fit_law
from parcae.laws.table import FitError

CONFIDENCE = 0.9
TRAINING_PARAMETERS = 5
"""Parameters determined by differences between runs; the test-time term is fitted within runs."""
WIDE_INTERVAL = 10.0
"""A floor or rate whose interval spans a larger factor is not identified."""
NEGLIGIBLE = 1e-4
"""The parameters of a term whose share of the loss is nowhere larger are not identified."""
ILL_CONDITIONED = 1e12
"""Condition number of the standardised Hessian above which the optimum is flat in float64."""
FEW_CONVERGED = 0.9

Values = Mapping[str, "float | np.ndarray"]
"""Parameters by name: numbers, or arrays with one entry per bootstrap sample."""


@dataclass(frozen=True)
class BootstrapSamples:
    """The parameters of a law in every bootstrap sample."""

    values: dict[str, np.ndarray]
    converged: float
    """Share of the samples that converged."""

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))


@dataclass(frozen=True)
class Quality:
    """Goodness of fit. Errors are relative: 0.01 is one per cent of the loss."""

    points: int
    objective: float
    r_squared: float
    mean_error: float
    max_error: float
    condition: float
    """Condition number of the Hessian in standardised coordinates."""


@dataclass(frozen=True)
class LawResult:
    """A fitted law as it is reported and saved: parameters, intervals, quality."""

    law: Law
    values: dict[str, float]
    samples: BootstrapSamples | None = None
    quality: Quality | None = None
    frozen: tuple[str, ...] = ()
    starts: StartCounts | None = None
    left_out: dict[float, float] = field(default_factory=dict)
    """By budget: mean relative error of the law fitted without it."""

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """90 % interval of each parameter; empty without bootstrap samples."""
        if self.samples is None:
            return {}
        return {name: interval(values) for name, values in self.samples.values.items()}


@dataclass(frozen=True)
class Estimate:
    """A value with its 90 % interval; None without bootstrap samples."""

    value: float
    low: float | None = None
    high: float | None = None


def assess(
    fit: LawFit, samples: int, seed: int, left_out: dict[float, float] | None = None
) -> tuple[LawResult, list[str]]:
    """The fit with its quality and bootstrap samples, and warnings about its parameters."""
    drawn = bootstrap(fit, samples, seed) if samples else None
    result = LawResult(
        law=fit.law,
        values=fit.values,
        samples=drawn,
        quality=quality(fit),
        frozen=fit.frozen,
        starts=fit.starts,
        left_out=left_out or {},
    )
    return result, [] if drawn is None else warnings(fit, drawn)


def bootstrap(fit: LawFit, samples: int, seed: int = 0) -> BootstrapSamples:
    """Refit `samples` bootstrap samples in one batch."""
    errors = sample_errors(fit, samples, np.random.default_rng(seed))
    targets = np.log(fit.predict(fit.points)) + errors
    objective = Objective(
        fit.law, fit.points, delta=fit.delta, frozen=fit.frozen_values(), log_losses=targets
    )
    ended = minimise(objective, np.repeat(_theta(fit, objective), samples, axis=1), BOOTSTRAP)
    values = fit.law.values(objective.bound.to_plain(objective.whole(ended.theta)))
    finite = np.all([np.isfinite(column) for column in values.values()], axis=0)
    if finite.mean() < 0.5:
        raise FitError(
            f"{fit.law.formula}: its parameters grow without bound in most bootstrap samples: the "
            "points do not determine them. Add runs."
        )
    kept = {name: column[finite] for name, column in values.items()}
    return BootstrapSamples(kept, float((ended.converged & finite).mean()))


def sample_errors(fit: LawFit, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Residuals in log loss of each bootstrap sample: [samples, points]."""
    residuals = fit.residuals()
    runs, run = np.unique(fit.points.run, return_inverse=True)
    count, losses = len(runs), len(residuals)
    means = np.bincount(run, residuals) / np.bincount(run)
    parameters = min(len(fit.law.parameters) - len(fit.frozen), TRAINING_PARAMETERS)
    freedom = max(count - parameters, 1)
    common = (means - means.mean()) * np.sqrt(count / freedom) * expansion(freedom)
    errors = common[rng.integers(count, size=(samples, count))][:, run]
    if losses > count:
        within = (residuals - means[run]) * np.sqrt(losses / (losses - count))
        errors += within * rng.choice([-1.0, 1.0], (samples, losses))
    return errors


def expansion(freedom: int, level: float = CONFIDENCE) -> float:
    """Student's quantile over the normal quantile, by the Cornish-Fisher expansion.

    It widens percentile intervals for a spread that is known from few degrees of freedom.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return (z + first + second) / z


def interval(values: np.ndarray, level: float = CONFIDENCE) -> tuple[float, float]:
    """Lower and upper quantile; infinite values (a loss never reached) are allowed."""
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="nearest")
    return float(low), float(high)


def estimate(result: LawResult, quantity: Callable[[Values], np.ndarray]) -> Estimate:
    """A quantity computed from the parameters, with its interval over the bootstrap samples."""
    value = float(np.atleast_1d(quantity(result.values))[0])
    if result.samples is None:
        return Estimate(value)
    return Estimate(value, *interval(np.atleast_1d(quantity(result.samples.values))))


def relative_errors(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return np.abs(predicted / measured - 1)


def quality(fit: LawFit) -> Quality:
    residuals = fit.residuals()
    logs = np.log(fit.points.loss)
    errors = relative_errors(fit.predict(fit.points), fit.points.loss)
    return Quality(
        points=len(fit.points),
        objective=fit.objective,
        r_squared=float(1 - (residuals**2).sum() / ((logs - logs.mean()) ** 2).sum()),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        condition=condition(fit),
    )


def condition(fit: LawFit) -> float:
    """Condition number of the scaled Hessian at the optimum, at most 1e300."""
    objective = Objective(fit.law, fit.points, delta=np.inf, frozen=fit.frozen_values())
    hessian = objective.curvature(_theta(fit, objective))[:, :, 0]
    size = np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    scaled = hessian / np.outer(size, size)
    if not np.isfinite(scaled).all():  # a term that is zero everywhere
        return 1e300
    return float(min(np.linalg.cond(scaled), 1e300))


def _theta(fit: LawFit, objective: Objective) -> np.ndarray:
    """The free coordinates [free parameters, 1] of the fit."""
    return objective.bound.from_plain(fit.law.coordinates(fit.values))[list(objective.free)]


def leave_one_budget_out(
    law: Law, points: Points, budget: np.ndarray, search: Search
) -> dict[float, float]:
    """By budget: the mean relative error at its runs of the law fitted to the other budgets."""
    errors = {}
    if len(np.unique(budget)) < 3:
        return errors
    for value in np.unique(budget):
        left = points.take(budget == value)
        rest = points.take(budget != value)
        if len(rest) > len(law.parameters):
            predicted = fit_law(law, rest, search).predict(left)
            errors[float(value)] = float(relative_errors(predicted, left.loss).mean())
    return errors


def warnings(fit: LawFit, samples: BootstrapSamples | None) -> list[str]:
    """Reasons not to trust the parameters of a fit."""
    messages = []
    name = fit.law.name
    for decay in fit.law.decays:
        share = _largest_share(fit, decay.parameters)
        if share < NEGLIGIBLE:
            messages.append(
                f"{name}: the term {decay.amplitude} is at most {share:.1g} of the loss, so "
                f"{decay.amplitude} and {decay.rate} are not identified."
            )
    floor = fit.law.floor
    if floor is not None and fit.values[floor] < NEGLIGIBLE * fit.points.loss.min():
        messages.append(
            f"{name}: {floor} went to zero: these runs are too far from the floor to determine it, "
            "and the other terms replace it. Trust predictions near the grid, not the parameters."
        )
    if samples is not None:
        amplitudes = {decay.amplitude for decay in fit.law.decays}
        for parameter in fit.law.parameters:
            if parameter in amplitudes or parameter in (*fit.frozen, *fit.law.exponents):
                continue
            low, high = interval(samples.values[parameter])
            if high > WIDE_INTERVAL * low:
                messages.append(
                    f"{name}: {parameter} is not identified: its interval is {low:.3g} to "
                    f"{high:.3g}. Trust predictions within the grid, not the parameter."
                )
        if samples.converged < FEW_CONVERGED:
            messages.append(
                f"{name}: only {samples.converged:.0%} of the bootstrap samples converged; its "
                "intervals are approximate."
            )
    if (number := condition(fit)) > ILL_CONDITIONED:
        messages.append(
            f"{name}: the optimum is flat (condition number {number:.1g}): the points do not "
            "determine all parameters."
        )
    starts = fit.starts
    if starts.converged < FEW_CONVERGED * starts.followed:
        messages.append(
            f"{name}: only {starts.converged} of the {starts.followed} starts that were followed "
            "to the end converged."
        )
    return messages


def _largest_share(fit: LawFit, parameters: tuple[str, ...]) -> float:
    """The largest share of one term in the predicted losses."""
    bound = fit.law.bind(fit.points)
    losses, terms = bound.forward(fit.law.coordinates(fit.values))
    listed = [decay.parameters for decay in fit.law.decays]
    return float((terms[listed.index(parameters)] / losses).max())
