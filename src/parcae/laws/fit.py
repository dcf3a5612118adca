"""Fitting a law: many random starts, all at once, and the best of them kept.

fit(laws.TRAINING, points)                          500 starts, successive halving
fit(laws.TRAINING, points, Search(halving=False))   every start to convergence
fit(laws.UNIFIED, points, frozen={"E": 2.66, ...})  only the other parameters move
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from parcae.config import ConfigError
from parcae.laws.forms import COLUMN, Law
from parcae.laws.lbfgs import Minimum, Tolerance, minimise
from parcae.laws.objective import DELTA, Objective
from parcae.laws.points import Points

SAME = 1e-6
"""Objectives that differ by less, relatively, count as the same optimum."""
NEARBY = Tolerance(slope=1e-9, decrease=1e-14, rounds=500, measured=(0, 20, 40, 80, 160, 320))
"""For starts that are near an optimum: the best one of many, or the fit of nearly the same data."""


class FitError(ConfigError):
    """Data that cannot carry the law. The message says what is missing and what would help."""


@dataclass(frozen=True)
class Search:
    """How the optimum is looked for."""

    starts: int = 500
    seed: int = 0
    delta: float = DELTA
    """Of the Huber loss; infinite for least squares."""
    halving: bool = True
    """Give up on the worse starts as they go; see `HALVING`."""
    tolerance: Tolerance = field(default_factory=Tolerance)


HALVING = {8: 128, 16: 32, 32: 8, 48: 4, 64: 2}
"""After so many evaluations of each start, only so many of the best go on."""
SURVIVORS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
"""Rounds at which the survivors measure the curvature anew: they are near an optimum by then."""


MOST_ROUNDS = 600
"""Of the survivors; who needs more is in a narrow valley bent by the Huber loss, where a measured
curvature misleads, and goes on without one."""


def halve(round_: int, values: np.ndarray) -> np.ndarray | None:
    kept = HALVING.get(round_)
    if kept is None or len(values) <= kept:
        return None
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argpartition(values, kept)[:kept]] = True
    return chosen


@dataclass(frozen=True)
class Fit:
    """A law with the parameters that suit the points best."""

    law: Law
    values: dict[str, float]
    objective: float
    """Sum over the points of the Huber loss (or of half the squares) in log loss."""
    delta: float
    frozen: tuple[str, ...]
    points: Points
    starts: int
    converged: float
    """Share of the starts that were followed to the end and converged there."""
    agreeing: float
    """Share of those that ended in the best optimum."""
    slope: float
    """Largest slope of the normalised objective at the end."""

    def predict(self, at: Points) -> np.ndarray:
        return self.law.predict(self.values, at)

    def residuals(self) -> np.ndarray:
        """Log of what was measured over what is predicted."""
        return np.log(self.points.loss) - np.log(self.predict(self.points))


def fit(
    law: Law,
    points: Points,
    search: Search = Search(),  # noqa: B008
    frozen: Mapping[str, float] | None = None,
) -> Fit:
    problem = objective(law, points, search.delta, frozen)
    check_enough(law, points, frozen or {})
    start = random_starts(problem, search.starts, np.random.default_rng(search.seed))
    found, best = descend(problem, start, search)
    whole = problem.bound.to_plain(problem.whole(best.theta))
    values = {name: float(row[0]) for name, row in law.values(whole).items()}
    check_finite(law, values)
    same = found.values[found.followed] <= best.values[0] * (1 + SAME) + 1e-9
    return Fit(
        law=law,
        values=values,
        objective=problem.total(float(best.values[0])),
        delta=search.delta,
        frozen=tuple(frozen or ()),
        points=points,
        starts=search.starts,
        converged=float(found.converged[found.followed].mean()),
        agreeing=float(same.mean()),
        slope=float(best.slopes[0]),
    )


def objective(
    law: Law,
    points: Points,
    delta: float,
    frozen: Mapping[str, float] | None = None,
    log_losses: np.ndarray | None = None,
) -> Objective:
    """What is minimised, in standardised coordinates, with the frozen parameters held."""
    if not frozen:
        return Objective(law, points, delta=delta, log_losses=log_losses)
    names = law.parameters
    free = tuple(place for place, name in enumerate(names) if name not in frozen)
    held = law.coordinates({name: frozen.get(name, 1.0) for name in names})
    base = law.bind(points, standardised=True).from_plain(held)[:, 0]
    return Objective(law, points, delta=delta, log_losses=log_losses, free=free, base=base)


def descend(problem: Objective, start: np.ndarray, search: Search) -> tuple[Minimum, Minimum]:
    """All starts, and the best of them followed to the last digit."""
    if search.halving:
        rounds = min(search.tolerance.rounds, MOST_ROUNDS)
        tolerance = replace(search.tolerance, measured=SURVIVORS, rounds=rounds)
        found = minimise(problem, start, tolerance, halve)
        _finish(problem, found, search.tolerance)
    else:
        found = minimise(problem, start, search.tolerance)
    best = found.values.argmin()
    return found, minimise(problem, found.theta[:, best : best + 1], NEARBY)


def _finish(problem: Objective, found: Minimum, tolerance: Tolerance) -> None:
    """The survivors that have not converged, by plain L-BFGS: as far as all starts would go."""
    late = np.flatnonzero(found.followed & ~found.converged)
    if len(late):
        end = minimise(problem.take(late), found.theta[:, late], tolerance)
        found.theta[:, late] = end.theta
        found.values[late], found.slopes[late] = end.values, end.slopes
        found.converged[late] = end.converged


def random_starts(problem: Objective, count: int, rng: np.random.Generator) -> np.ndarray:
    """[free parameters, count] in standardised coordinates, wide around anything plausible.

    The floor is 10 to 100 % of the lowest loss. A term over N or D is 1 to 100 % of the mean loss
    at the centre of the points; a term over T is 1 to 1000 % of the losses' range at T = 0. A rate
    changes its term by a factor e^0.03 to e^5 within one standard deviation of the feature.
    """
    points, law = problem.points, problem.law
    losses = points.loss
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
    return np.stack(rows)[list(problem.free)]


def check_enough(law: Law, points: Points, frozen: Mapping[str, float]) -> None:
    free = [name for name in law.parameters if name not in frozen]
    if len(points) <= len(free):
        raise FitError(
            f"{law.formula}: {len(points)} points cannot fix {len(free)} parameters. "
            f"Measure at least {len(free) + 1}."
        )
    for decay in law.decays:
        feature = decay.feature(points)
        if decay.rate in free and np.ptp(feature) <= 1e-9 * np.abs(feature).max():
            column = COLUMN.get(decay.feature, "test_loops")
            raise FitError(
                f"{law.formula}: all points have the same {column}, so {decay.amplitude} and "
                f"{decay.rate} cannot be told from the rest. Measure at several."
            )


def check_finite(law: Law, values: Mapping[str, float]) -> None:
    lost = [name for name, value in values.items() if not math.isfinite(value)]
    if lost:
        raise FitError(
            f"{law.formula}: {' and '.join(lost)} grow without bound, so the points do not fix "
            "them. Add runs that differ more in parameters and tokens."
        )
