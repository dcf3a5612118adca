"""How sure a fit is: the same fit of data that might have come out instead.

A residual bootstrap over runs. The design stays as it is, since the grid was chosen and not drawn;
each replica gives every run the error of a run drawn at random, inflated for the parameters that
the fit has spent and for the few runs that the size of errors is known from. What the losses of
one run at several T differ by beyond that common error keeps its place and gets a random sign.
Drawing runs instead ("pairs") covered as well, but leaves some budgets of a small grid almost
empty; drawing single losses would take the ten losses of a run for ten runs.
`docs/scaling-laws.md` has the measured coverage.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from parcae.laws.fit import Fit, FitError, objective
from parcae.laws.lbfgs import Tolerance, minimise

LEVEL = 0.9
REPLICA = Tolerance(slope=1e-4, decrease=1e-8, rounds=1000)
"""Replicas start at the fit; digits beyond a thousandth of their spread would say nothing. The
curvature is not measured: where noise leaves a parameter open, that would stop them halfway."""
TRAINING_PARAMETERS = 5
"""The parameters that runs are spent on; those of the test-time term are fixed by T within runs."""


@dataclass(frozen=True)
class Draws:
    """The parameters of a law in every replica."""

    values: dict[str, np.ndarray]
    converged: float
    """Share of the replicas that converged."""

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))


def bootstrap(fit: Fit, draws: int = 200, seed: int = 0) -> Draws:
    """Refit `draws` replicas, all at once."""
    errors = replica_errors(fit, draws, np.random.default_rng(seed))
    targets = np.log(fit.predict(fit.points)) + errors
    frozen = {name: fit.values[name] for name in fit.frozen}
    problem = objective(fit.law, fit.points, fit.delta, frozen, log_losses=targets)
    start = problem.bound.from_plain(fit.law.coordinates(fit.values))[list(problem.free)]
    found = minimise(problem, np.repeat(start, draws, axis=1), REPLICA)
    values = fit.law.values(problem.bound.to_plain(problem.whole(found.theta)))
    sound = np.all([np.isfinite(column) for column in values.values()], axis=0)
    if sound.mean() < 0.5:
        raise FitError(
            f"{fit.law.formula}: in most replicas of the data its parameters grow without bound, "
            "so the points do not fix them. Add runs."
        )
    kept = {name: column[sound] for name, column in values.items()}
    return Draws(kept, float((found.converged & sound).mean()))


def replica_errors(fit: Fit, draws: int, rng: np.random.Generator) -> np.ndarray:
    """[draws, points]: residuals in log loss that the runs might have had."""
    residuals = fit.residuals()
    names, place = np.unique(fit.points.run, return_inverse=True)
    runs, losses = len(names), len(residuals)
    own = np.bincount(place, residuals) / np.bincount(place)
    spent = min(len(fit.law.parameters) - len(fit.frozen), TRAINING_PARAMETERS)
    left = max(runs - spent, 1)
    common = (own - own.mean()) * np.sqrt(runs / left) * expansion(left)
    errors = common[rng.integers(runs, size=(draws, runs))][:, place]
    if losses > runs:
        within = (residuals - own[place]) * np.sqrt(losses / (losses - runs))
        errors += within * rng.choice([-1.0, 1.0], (draws, losses))
    return errors


def expansion(freedom: int, level: float = LEVEL) -> float:
    """Student's quantile over the normal one, by the expansion of Cornish and Fisher: percentiles
    of replicas know the spread of the errors only as well as so many degrees of freedom tell it."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return (z + first + second) / z


def interval(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """The middle share of the draws; infinite draws (a loss never reached) stay infinite."""
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="nearest")
    return float(low), float(high)
