"""Fit one law: the objective, and its minimum from many random starts in one batch.

fit_law(TRAINING, points)                              500 starts, successive halving
fit_law(TRAINING, points, Search(halving=False))       every start to convergence
fit_law(UNIFIED, points, frozen={"E": 2.66, ...})      only the other parameters are fitted
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parcae.console import format_items
from parcae.laws import DEFAULT_STARTS
from parcae.laws.forms import COLUMN, Law
from parcae.laws.lbfgs import Minimum, Schedule, minimise
from parcae.laws.model_runs import Points
from parcae.laws.table import FitError

DELTA = 1e-3
"""Where the Huber loss changes from squares to absolute values, as in Hoffmann et al."""
CHUNK = 16_384
"""Residuals computed at once: arrays of this size stay in the cache, which is 2.5 times as fast as
all rows at once."""
SAME_OPTIMUM = 1e-6
"""Relative difference of objectives below which two starts found the same optimum."""

# The schedules of all fits in this package.
EVERY_START = Schedule()
"""Random starts of a law, followed to convergence."""
HALVING = {8: 128, 16: 32, 32: 8, 48: 4, 64: 2}
"""Successive halving: after this many rounds, only this many of the best starts continue."""
SURVIVORS = Schedule(rounds=600, measured=(32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512))
"""Starts under successive halving. Those that have not converged after `rounds` are in a narrow
valley bent by the Huber loss, where measured curvature misleads: they continue by `EVERY_START`."""
POLISH = Schedule(slope=1e-9, decrease=1e-14, rounds=500, measured=(0, 20, 40, 80, 160, 320))
"""The best of all starts, to full precision."""
BOOTSTRAP = Schedule(slope=1e-4, decrease=1e-8, rounds=1000)
"""Bootstrap samples, which start at the fit: more digits would be far below their spread. Curvature
is not measured: where noise leaves a parameter undetermined, that would stop them too early."""
CURVES = Schedule(slope=1e-3, decrease=1e-6, rounds=150)
"""Random starts of test-time curves."""
CURVES_POLISH = Schedule(slope=1e-8, decrease=1e-12, rounds=200, measured=(0, 20, 40, 80))
"""The best start of each test-time curve."""


@dataclass(frozen=True)
class Search:
    """How the optimum is searched for."""

    starts: int = DEFAULT_STARTS
    seed: int = 0
    delta: float = DELTA
    """Threshold of the Huber loss; infinite for least squares."""
    halving: bool = True
    """Drop the worse starts early (`HALVING`) instead of following all to convergence."""


DEFAULT_SEARCH = Search()


@dataclass(frozen=True)
class StartCounts:
    """What became of the starts of a fit."""

    tried: int
    followed: int
    """Those that successive halving did not drop; the counts below are of these."""
    converged: int
    agreeing: int
    """Those that found the best optimum."""


@dataclass(frozen=True)
class LawFit:
    """The parameters of a law that minimise the objective at some points."""

    law: Law
    values: dict[str, float]
    objective: float
    """Sum over the points of the Huber loss (or of half the squares) in log loss."""
    delta: float
    frozen: tuple[str, ...]
    points: Points
    starts: StartCounts
    slope: float
    """Largest slope of the normalised objective at the optimum."""

    def predict(self, at: Points) -> np.ndarray:
        return self.law.predict(self.values, at)

    def residuals(self) -> np.ndarray:
        """log(measured / predicted) at the points."""
        return np.log(self.points.loss) - np.log(self.predict(self.points))

    def frozen_values(self) -> dict[str, float]:
        return {name: self.values[name] for name in self.frozen}


def fit_law(
    law: Law,
    points: Points,
    search: Search = DEFAULT_SEARCH,
    frozen: Mapping[str, float] | None = None,
    known: Sequence[Mapping[str, float]] = (),
) -> LawFit:
    """Fit a law to points; parameters in `frozen` keep their values. `known`: values to start from
    in addition to the random ones."""
    objective = Objective(law, points, delta=search.delta, frozen=frozen)
    _check_enough(law, points, frozen or {})
    start = random_starts(objective, search.starts, np.random.default_rng(search.seed))
    for values in known:
        coordinates = objective.bound.from_plain(law.coordinates(values))
        start = np.concatenate([start, coordinates[list(objective.free)]], axis=1)
    ended, best = descend(objective, start, halving=search.halving)
    coordinates = objective.bound.to_plain(objective.whole(best.theta))
    values = {name: float(row[0]) for name, row in law.values(coordinates).items()}
    _check_finite(law, values)
    same = ended.values[ended.followed] <= best.values[0] * (1 + SAME_OPTIMUM) + 1e-9
    return LawFit(
        law=law,
        values=values,
        objective=objective.total(float(best.values[0])),
        delta=search.delta,
        frozen=tuple(frozen or ()),
        points=points,
        starts=StartCounts(
            tried=start.shape[1],
            followed=int(ended.followed.sum()),
            converged=int(ended.converged[ended.followed].sum()),
            agreeing=int(same.sum()),
        ),
        slope=float(best.slopes[0]),
    )


def huber(residuals: np.ndarray, delta: float = DELTA) -> np.ndarray:
    """r^2 / 2 up to delta, delta (|r| - delta / 2) beyond."""
    clipped = np.clip(residuals, -delta, delta)
    return clipped * (residuals - clipped / 2)


class Objective:
    """Mean of huber(log prediction - log loss) / DELTA^2 for many rows of coordinates at once.

    The division makes values and slopes of the order of 1 near the optimum for all data, so that
    one schedule suits all; `total` gives the sum that papers report. Parameters in `frozen` keep
    their values. With `log_losses` of shape [rows, points] each row has its own targets.
    """

    def __init__(
        self,
        law: Law,
        points: Points,
        *,
        delta: float = DELTA,
        frozen: Mapping[str, float] | None = None,
        log_losses: np.ndarray | None = None,
    ) -> None:
        names = law.parameters
        self.law = law
        self.points = points
        self.delta = delta
        self.bound = law.bind(points, standardised=True)
        self.log_losses = np.log(points.loss) if log_losses is None else log_losses
        self.free = tuple(i for i, name in enumerate(names) if name not in (frozen or {}))
        """Indices of the parameters that are fitted."""
        self.base: np.ndarray | None = None
        """Coordinates [parameters] of the frozen parameters; None if all are free."""
        if frozen:
            values = law.coordinates({name: frozen.get(name, 1.0) for name in names})
            self.base = self.bound.from_plain(values)[:, 0]
        self.scale = 1.0 / (DELTA * DELTA * len(points))

    def __call__(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values [rows] and gradients [free parameters, rows]."""
        rows, size = theta.shape[1], max(1, CHUNK // len(self.points))
        if rows <= size:
            return self._compute(theta)
        values, gradient = np.empty(rows), np.empty_like(theta)
        for first in range(0, rows, size):
            part = slice(first, first + size)
            values[part], gradient[:, part] = self.take(part)._compute(theta[:, part])
        return values, gradient

    def _compute(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        whole = self.whole(theta)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            losses, terms = self.bound.forward(whole)
            residuals = np.log(losses)
            residuals -= self.log_losses
            if math.isinf(self.delta):
                slopes = residuals
                values = 0.5 * np.einsum("rn,rn->r", residuals, residuals)
            else:
                slopes = np.clip(residuals, -self.delta, self.delta)
                values = np.einsum("rn,rn->r", slopes, residuals - 0.5 * slopes)
            np.divide(slopes, losses, out=losses)
            gradient = self.bound.backward(whole, terms, losses)
        if len(self.free) < len(whole):
            gradient = gradient[list(self.free)]
        values *= self.scale
        gradient *= self.scale
        return values, gradient

    def curvature(self, theta: np.ndarray) -> np.ndarray:
        """Gauss-Newton Hessians [free, free, rows], positive semidefinite everywhere.

        Residuals beyond delta have the weight delta / |r|, as in iterated least squares.
        """
        rows, size = theta.shape[1], max(1, CHUNK // len(self.points))
        hessian = np.empty((len(self.free), len(self.free), rows))
        for first in range(0, rows, size):
            part = slice(first, first + size)
            self.take(part)._fill_curvature(theta[:, part], hessian[:, :, part])
        return hessian

    def _fill_curvature(self, theta: np.ndarray, hessian: np.ndarray) -> None:
        whole = self.whole(theta)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            losses, terms = self.bound.forward(whole)
            residuals = np.abs(np.log(losses) - self.log_losses)
            weights = self.scale * np.minimum(1.0, self.delta / residuals)
            factor = np.sqrt(weights) / losses
            slopes = self.bound.derivatives(whole, terms)
            chosen = [slopes[index] * factor for index in self.free]
        for p, left in enumerate(chosen):
            for q, right in enumerate(chosen[: p + 1]):
                hessian[p, q] = hessian[q, p] = np.einsum("rn,rn->r", left, right)

    def whole(self, theta: np.ndarray) -> np.ndarray:
        """Coordinates of all parameters: `theta` for the free ones, the rest frozen."""
        if self.base is None:
            return theta
        whole = np.repeat(self.base[:, None], theta.shape[1], axis=1)
        whole[list(self.free)] = theta
        return whole

    def take(self, rows: np.ndarray | slice) -> Objective:
        """The objective of some of the rows."""
        if self.log_losses.ndim == 1:
            return self
        part = object.__new__(Objective)
        part.__dict__.update(self.__dict__)
        part.log_losses = self.log_losses[rows]
        return part

    def total(self, value: float) -> float:
        """Convert a value of this objective to the sum of Huber losses over the points."""
        return value / self.scale


def descend(
    objective: Objective, start: np.ndarray, *, halving: bool = True
) -> tuple[Minimum, Minimum]:
    """Minimise from all starts; return where they ended, and the best one polished."""
    if halving:
        ended = minimise(objective, start, SURVIVORS, halve)
        _finish(objective, ended)
    else:
        ended = minimise(objective, start, EVERY_START)
    best = ended.values.argmin()
    return ended, minimise(objective, ended.theta[:, best : best + 1], POLISH)


def halve(round_: int, values: np.ndarray) -> np.ndarray | None:
    """The mask of the rows that continue after this round; None for all of them."""
    count = HALVING.get(round_)
    if count is None or len(values) <= count:
        return None
    kept = np.zeros(len(values), dtype=bool)
    kept[np.argpartition(values, count)[:count]] = True
    return kept


def _finish(objective: Objective, ended: Minimum) -> None:
    """Continue the survivors that have not converged by plain L-BFGS."""
    rows = np.flatnonzero(ended.followed & ~ended.converged)
    if len(rows):
        finished = minimise(objective.take(rows), ended.theta[:, rows], EVERY_START)
        ended.theta[:, rows] = finished.theta
        ended.values[rows], ended.slopes[rows] = finished.values, finished.slopes
        ended.converged[rows] = finished.converged


def random_starts(objective: Objective, count: int, rng: np.random.Generator) -> np.ndarray:
    """Starts [free parameters, count] in standardised coordinates, wide around plausible values.

    The floor is 10 to 100 % of the lowest loss. A term in N or D is 1 to 100 % of the mean loss at
    the centre of the points; a term in T is 1 to 1000 % of the range of the losses at T = 0. A rate
    changes its term by a factor of e^0.03 to e^5 within one standard deviation of the feature.
    """
    law, losses = objective.law, objective.points.loss
    spread = max(float(losses.max() - losses.min()), 1e-6)
    rows = [] if law.floor is None else [np.log(losses.min() * rng.uniform(0.1, 1.0, count))]
    for decay in law.decays:
        mean, low, high = (losses.mean(), 0.01, 1) if decay.is_centred else (spread, 0.01, 10)
        if law.floor is None:
            mean, low, high = losses.max(), 0.5, 2
        rows.append(np.log(mean) + rng.uniform(math.log(low), math.log(high), count))
        rows.append(rng.uniform(math.log(0.03), math.log(5), count))
        if decay.exponent:
            rows.append(rng.uniform(-0.5, 2.0, count))
    return np.stack(rows)[list(objective.free)]


def _check_enough(law: Law, points: Points, frozen: Mapping[str, float]) -> None:
    free = [name for name in law.parameters if name not in frozen]
    if len(points) <= len(free):
        points_given = format_items(len(points), "point")
        parameters = format_items(len(free), "parameter")
        raise FitError(
            f"{law.formula}: {points_given} cannot determine {parameters}. "
            f"Measure at least {len(free) + 1}."
        )
    for decay in law.decays:
        feature = decay.feature(points)
        if decay.rate in free and np.ptp(feature) <= 1e-9 * np.abs(feature).max():
            column = COLUMN.get(decay.feature, "test_loops")
            raise FitError(
                f"{law.formula}: all points have the same {column}, so {decay.amplitude} and "
                f"{decay.rate} are not determined. Measure at several."
            )


def _check_finite(law: Law, values: Mapping[str, float]) -> None:
    infinite = [name for name, value in values.items() if not math.isfinite(value)]
    if infinite:
        raise FitError(
            f"{law.formula}: no finite {' and '.join(infinite)}: the points do not determine "
            "this law. Add runs that differ more in parameters, tokens and test_loops."
        )
