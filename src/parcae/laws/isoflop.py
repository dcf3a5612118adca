"""Parabolas over each FLOP budget, their lowest points, and the power laws these follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parcae.laws.fit import FitError

FEWEST = 4
"""A parabola has three parameters; with three points it would fit anything."""


@dataclass(frozen=True)
class Parabola:
    """loss = a + b u + c u^2 over u = log(mu) or log(D), at one budget."""

    budget: float
    coefficients: tuple[float, float, float]
    """Of u - centre: constant, linear, quadratic."""
    centre: float
    low: float
    high: float
    """The range of mu or D that was measured."""

    @property
    def is_convex(self) -> bool:
        return self.coefficients[2] > 0

    @property
    def optimum(self) -> float:
        """Where the loss is lowest; NaN if the parabola opens downwards."""
        if not self.is_convex:
            return float("nan")
        _, linear, quadratic = self.coefficients
        away = np.clip(-linear / (2 * quadratic), -20.0, 20.0)
        return float(np.exp(self.centre + away))

    @property
    def is_inside(self) -> bool:
        """An optimum beyond the runs is an extrapolation."""
        return self.is_convex and self.low <= self.optimum <= self.high

    def loss(self, where: np.ndarray | float) -> np.ndarray:
        away = np.log(where) - self.centre
        constant, linear, quadratic = self.coefficients
        return constant + linear * away + quadratic * away**2


@dataclass(frozen=True)
class PowerLaw:
    """value = factor * C^exponent."""

    factor: float
    exponent: float
    budgets: tuple[float, ...]
    """Those whose optimum was used."""
    replicas: tuple[tuple[float, float], ...] = ()
    """Of the bootstrap: the logarithm of each one's factor, which may be beyond all numbers, and
    its exponent."""

    def __call__(self, flops: np.ndarray | float) -> np.ndarray:
        return self.factor * np.asarray(flops, dtype=float) ** self.exponent

    def exponents(self) -> np.ndarray:
        """Of the replicas."""
        return np.array([exponent for _, exponent in self.replicas])

    def at(self, flops: float) -> np.ndarray:
        """What the replicas say."""
        logs = [factor + exponent * np.log(flops) for factor, exponent in self.replicas]
        with np.errstate(over="ignore"):
            return np.exp(np.array(logs))


def fit_parabolas(where: np.ndarray, loss: np.ndarray, budget: np.ndarray) -> list[Parabola]:
    """One for each budget with enough different places."""
    found = []
    for one in np.unique(budget):
        here = budget == one
        places = np.log(where[here])
        if len(np.unique(places)) < FEWEST:
            continue
        centre = float(places.mean())
        quadratic, linear, constant = np.polyfit(places - centre, loss[here], 2)
        found.append(
            Parabola(
                budget=float(one),
                coefficients=(float(constant), float(linear), float(quadratic)),
                centre=centre,
                low=float(where[here].min()),
                high=float(where[here].max()),
            )
        )
    if not found:
        raise FitError(
            f"parabolas: no budget has runs at {FEWEST} or more depths. Train more values of "
            "mean_loops at the same FLOPs."
        )
    return found


def fit_power_law(parabolas: list[Parabola]) -> PowerLaw:
    """A line through the logarithms of the optima that lie within their runs."""
    used = [one for one in parabolas if one.is_inside]
    if len(used) < 2:
        raise FitError(
            f"power law: {len(used)} of {len(parabolas)} budgets have their optimum within the "
            "runs, and a line needs two. Widen the range of mean_loops, or add budgets."
        )
    budgets = np.log([one.budget for one in used])
    optima = np.log([one.optimum for one in used])
    exponent, constant = np.polyfit(budgets, optima, 1)
    return PowerLaw(float(np.exp(constant)), float(exponent), tuple(one.budget for one in used))


def with_replicas(law: PowerLaw, drawn: list[list[Parabola]]) -> PowerLaw:
    """Those of the replicas that have optima within their runs; none where half of them do not."""
    found = []
    for parabolas in drawn:
        try:
            one = fit_power_law(parabolas)
        except FitError:
            continue
        if one.factor > 0:
            found.append((float(np.log(one.factor)), one.exponent))
    return replace(law, replicas=tuple(found) if 2 * len(found) >= len(drawn) else ())


def replicas(
    parabolas: list[Parabola],
    where: np.ndarray,
    loss: np.ndarray,
    budget: np.ndarray,
    draws: int,
    seed: int = 0,
) -> list[list[Parabola]]:
    """Parabolas of data that might have come out: residuals of all budgets, dealt out anew."""
    rng = np.random.default_rng(seed)
    fitted, residuals = np.full(len(loss), np.nan), []
    for one in parabolas:
        here = budget == one.budget
        fitted[here] = one.loss(where[here])
        count = int(here.sum())
        residuals.append((loss[here] - fitted[here]) * np.sqrt(count / max(count - 3, 1)))
    known = np.isfinite(fitted)
    pool = np.concatenate(residuals)
    return [
        fit_parabolas(
            where[known], fitted[known] + rng.choice(pool, int(known.sum())), budget[known]
        )
        for _ in range(draws)
    ]
