"""L-BFGS from many starting points at once, in numpy.

Each start is a row. In each round one point per row is evaluated: the next trial of its line
search. Rows whose trial satisfies the weak Wolfe conditions take the step and get a new direction
from the two-loop recursion; the others keep their direction and move the trial (bisection between
too far and too short, Lewis & Overton). A row that takes no step stores an empty pair (s = y = 0),
which does not change the recursion; so all rows share one ring buffer of pairs, and no row waits
for another's line search. Finished rows are removed from the batch from time to time.

Arrays are [parameters, rows], so that vectorised operations run along the long axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

ARMIJO, CURVATURE = 1e-4, 0.9
MAX_TRIALS = 25
"""Halvings of a step before a row gives up its direction."""
RIDGE = 1e-9
"""Share of the trace added to the diagonal of a measured Hessian, to keep its inverse finite."""
ROUNDING = 1e-15
"""Relative change of the objective that is rounding error."""


class Function(Protocol):
    """A differentiable function evaluated for many rows at once."""

    def __call__(self, theta: np.ndarray, /) -> tuple[np.ndarray, np.ndarray]:
        """Values [rows] and gradients [parameters, rows]."""
        ...

    def take(self, rows: np.ndarray, /) -> Function:
        """The function restricted to these rows."""
        ...

    def curvature(self, theta: np.ndarray, /) -> np.ndarray:
        """Hessians, or positive approximations of them: [parameters, parameters, rows]."""
        ...


@dataclass(frozen=True)
class Schedule:
    """When a row has converged, and at which rounds the curvature is measured.

    A row has converged when its largest slope is below `slope`, or when a step decreased the
    objective by less than `decrease` (relative, or absolute where the objective is below 1).
    """

    slope: float = 1e-6
    decrease: float = 1e-12
    rounds: int = 10_000
    pairs: int = 20
    """More than L-BFGS usually stores: with five to eight parameters they cost almost nothing."""
    measured: tuple[int, ...] = ()
    """Rounds at which the initial matrix of the recursion is set to the inverse of the curvature.
    Near an optimum this saves hundreds of steps along narrow valleys; far from one it can move
    rows onto plateaus, so it is for warm starts and survivors of successive halving only."""


TO_CONVERGENCE = Schedule()


@dataclass
class Minimum:
    """The last point of each row, in the order of the starts."""

    theta: np.ndarray
    values: np.ndarray
    slopes: np.ndarray
    """The largest absolute entry of each row's gradient."""
    converged: np.ndarray
    followed: np.ndarray
    """Rows that were not dropped before the end."""
    rounds: int
    evaluations: int


Chooser = Callable[[int, np.ndarray], "np.ndarray | None"]
"""From a round and the values of the active rows: a mask of those to keep, or None for all."""


def minimise(
    function: Function,
    start: np.ndarray,
    schedule: Schedule = TO_CONVERGENCE,
    choose: Chooser | None = None,
) -> Minimum:
    """Minimise from every column of `start`."""
    rows = _Rows(function, start, schedule)
    count = start.shape[1]
    ended = Minimum(
        theta=start.copy(),
        values=np.full(count, np.inf),
        slopes=np.full(count, np.inf),
        converged=np.zeros(count, dtype=bool),
        followed=np.ones(count, dtype=bool),
        rounds=0,
        evaluations=count,
    )
    while len(rows) and ended.rounds < schedule.rounds:
        if ended.rounds in schedule.measured:
            rows.measure()
        rows.advance()
        ended.rounds += 1
        ended.evaluations += len(rows)
        chosen = None if choose is None else choose(ended.rounds, rows.values)
        if chosen is not None:
            ended.followed[rows.indices[~chosen]] = False
            rows = rows.leave(~chosen, ended)
        if rows.done.mean() > 0.1 or rows.done.all():
            rows = rows.leave(rows.done, ended)
    rows.leave(np.ones(len(rows), dtype=bool), ended)
    return ended


class _Rows:
    """The active rows and their state."""

    def __init__(self, function: Function, start: np.ndarray, schedule: Schedule) -> None:
        size, count = start.shape
        self.function = function
        self.schedule = schedule
        self.indices = np.arange(count)
        self.theta = start.copy()
        self.values, self.gradient = function(self.theta)
        self.steps = np.zeros((schedule.pairs, size, count))
        self.changes = np.zeros((schedule.pairs, size, count))
        self.curvatures = np.zeros((schedule.pairs, count))
        """1 / (s . y) of each pair; 0 for an empty one."""
        self.stored = 0
        self.scale = np.ones(count)
        self.metric: np.ndarray | None = None
        """Initial matrices of the recursion, if measured; else `scale` times the identity."""
        self.done = np.zeros(count, dtype=bool)
        self.converged = np.zeros(count, dtype=bool)
        self.is_fresh = np.ones(count, dtype=bool)
        """Rows that follow the negative gradient because they have no pairs."""
        self.direction = -self.gradient
        self.length, self.slope = np.ones(count), np.zeros(count)
        self.low, self.high = np.zeros(count), np.full(count, np.inf)
        self.trials = np.zeros(count, dtype=int)
        self._begin_search(self.is_fresh)

    def __len__(self) -> int:
        return len(self.indices)

    def advance(self) -> None:
        """Evaluate every row once: take the step if the trial is accepted, else move the trial."""
        trial = self.theta + self.length * self.direction
        values, gradient = self.function(trial)
        slope = np.einsum("pr,pr->r", gradient, self.direction)
        finite = np.isfinite(values) & np.isfinite(gradient).all(0)
        with np.errstate(invalid="ignore"):
            low_enough = finite & (values <= self.values + ARMIJO * self.length * self.slope)
            take = low_enough & (slope >= CURVATURE * self.slope) & ~self.done
        gained = np.where(finite, self.values - values, -np.inf)
        self._narrow(low_enough, ~take & ~self.done)
        self._check(take, gained, np.abs(gradient).max(0))
        if take.any():
            self._step(take, trial, values, gradient)

    def _narrow(self, low_enough: np.ndarray, searching: np.ndarray) -> None:
        """Move rejected trials: closer if the value did not decrease enough, else farther."""
        self.trials = np.where(searching, self.trials + 1, 0)
        self.high = np.where(searching & ~low_enough, self.length, self.high)
        self.low = np.where(searching & low_enough, self.length, self.low)
        between = np.where(np.isinf(self.high), 2 * self.length, (self.low + self.high) / 2)
        self.length = np.where(searching, between, self.length)

    def _check(self, take: np.ndarray, gained: np.ndarray, slopes: np.ndarray) -> None:
        """Mark finished rows, and restart stuck rows once along the negative gradient."""
        size = np.abs(self.values)
        converged = take & (gained <= self.schedule.decrease * np.maximum(size, 1.0))
        converged |= take & (slopes <= self.schedule.slope)
        waiting = ~take & ~self.done
        converged |= waiting & (self.trials > 3) & (np.abs(gained) <= ROUNDING * size)
        stuck = waiting & ~converged & (self.trials >= MAX_TRIALS)
        restarted = stuck & ~self.is_fresh
        self.converged |= converged
        self.done |= converged | (stuck & self.is_fresh)
        if restarted.any():
            self.curvatures[:, restarted] = 0.0
            self.direction = np.where(restarted, -self.gradient, self.direction)
            self.is_fresh |= restarted
            self._begin_search(restarted)

    def _step(
        self, take: np.ndarray, trial: np.ndarray, values: np.ndarray, gradient: np.ndarray
    ) -> None:
        step = np.where(take, trial - self.theta, 0.0)
        change = np.where(take, gradient - self.gradient, 0.0)
        product = np.einsum("pr,pr->r", step, change)
        sound = take & (product > 0)
        slot = self.stored % len(self.steps)
        self.stored += 1
        self.steps[slot], self.changes[slot] = step, change
        self.curvatures[slot] = np.where(sound, 1.0 / np.where(sound, product, 1.0), 0.0)
        if self.metric is None:
            squares = np.einsum("pr,pr->r", change, change)
            self.scale = np.where(sound, product / np.where(sound, squares, 1.0), self.scale)
        self.theta = np.where(take, trial, self.theta)
        self.values = np.where(take, values, self.values)
        self.gradient = np.where(take, gradient, self.gradient)
        self.is_fresh &= ~take
        self.direction = np.where(take, self._downhill(), self.direction)
        self._begin_search(take)

    def _downhill(self) -> np.ndarray:
        """Minus the inverse Hessian times the gradient, by the two-loop recursion."""
        count = min(self.stored, len(self.steps))
        order = [(self.stored - 1 - back) % len(self.steps) for back in range(count)]
        aim = self.gradient.copy()
        shares = {}
        for slot in order:
            share = np.einsum("pr,pr->r", self.steps[slot], aim)
            share *= self.curvatures[slot]
            aim -= share * self.changes[slot]
            shares[slot] = share
        aim = self.scale * aim if self.metric is None else np.einsum("pqr,qr->pr", self.metric, aim)
        for slot in reversed(order):
            share = np.einsum("pr,pr->r", self.changes[slot], aim)
            share *= self.curvatures[slot]
            aim += (shares[slot] - share) * self.steps[slot]
        return -aim

    def measure(self) -> None:
        """Drop the pairs and use the curvature at the rows' current points."""
        hessian = np.moveaxis(self.function.curvature(self.theta), 2, 0)
        trace = np.trace(hessian, axis1=1, axis2=2)
        sound = np.isfinite(trace) & (trace > 0)
        identity = np.eye(len(self.theta))
        ridge = RIDGE * np.where(sound, trace, 1 / RIDGE)[:, None, None] * identity
        hessian = np.where(sound[:, None, None], hessian, 0.0) + ridge
        self.metric = np.moveaxis(np.linalg.inv(hessian), 0, 2).copy()
        self.curvatures[:] = 0.0
        self.is_fresh[:] = False
        self.direction = np.where(self.done, self.direction, self._downhill())
        self._begin_search(~self.done)

    def _begin_search(self, which: np.ndarray) -> None:
        """Start a line search: with a full step, or a short one if there are no pairs."""
        slope = np.einsum("pr,pr->r", self.gradient, self.direction)
        uphill = which & ~(slope < 0)
        if uphill.any():
            self.direction = np.where(uphill, -self.gradient, self.direction)
            self.is_fresh |= uphill
            slope = np.einsum("pr,pr->r", self.gradient, self.direction)
        short = np.minimum(1.0, 1.0 / np.maximum(np.abs(self.gradient).sum(0), 1e-300))
        self.length = np.where(which, np.where(self.is_fresh, short, 1.0), self.length)
        self.slope = np.where(which, slope, self.slope)
        self.low = np.where(which, 0.0, self.low)
        self.high = np.where(which, np.inf, self.high)
        self.trials = np.where(which, 0, self.trials)

    def leave(self, leaving: np.ndarray, ended: Minimum) -> _Rows:
        """Record the rows that leave in `ended` and return the others."""
        indices = self.indices[leaving]
        ended.theta[:, indices] = self.theta[:, leaving]
        ended.values[indices] = self.values[leaving]
        ended.slopes[indices] = np.abs(self.gradient[:, leaving]).max(0, initial=0.0)
        ended.converged[indices] = self.converged[leaving]
        part = object.__new__(_Rows)
        part.__dict__.update(self.__dict__)
        part.function = self.function.take(~leaving)
        for name, value in self.__dict__.items():
            if isinstance(value, np.ndarray):
                setattr(part, name, value[..., ~leaving])
        return part
