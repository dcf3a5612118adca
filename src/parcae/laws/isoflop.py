"""The best use of a FLOP budget: parabolas, power laws of their optima, and the frontier of a law.

Two independent methods: parabolas through the losses at each budget (no law needed), and the
minimum of the training law over mean_loops at fixed FLOPs (`frontier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parcae.console import format_flops, format_items
from parcae.laws.bootstrap import Estimate, LawResult, Values, interval
from parcae.laws.forms import TRAINING
from parcae.laws.model_runs import CostModel, ModelRuns
from parcae.laws.table import FitError

MIN_PARABOLA_POINTS = 4
"""Depths per parabola: three points would determine its three parameters exactly."""


@dataclass(frozen=True)
class Parabola:
    """loss = a + b u + c u^2 with u = log(mu) or log(D), at one budget."""

    budget: float
    coefficients: tuple[float, float, float]
    """Constant, linear and quadratic, in u - centre."""
    centre: float
    low: float
    high: float
    """The range of mu or D that was measured."""

    @property
    def is_convex(self) -> bool:
        return self.coefficients[2] > 0

    @property
    def optimum(self) -> float:
        """mu or D of the lowest loss; NaN if the parabola opens downwards."""
        if not self.is_convex:
            return float("nan")
        _, linear, quadratic = self.coefficients
        offset = np.clip(-linear / (2 * quadratic), -20.0, 20.0)
        return float(np.exp(self.centre + offset))

    @property
    def is_inside(self) -> bool:
        """Whether the optimum lies within the measured range."""
        return self.is_convex and self.low <= self.optimum <= self.high

    def loss(self, where: np.ndarray | float) -> np.ndarray:
        offset = np.log(where) - self.centre
        constant, linear, quadratic = self.coefficients
        return constant + linear * offset + quadratic * offset**2


@dataclass(frozen=True)
class PowerLaw:
    """optimum = factor * C^exponent, with C in FLOPs."""

    factor: float
    exponent: float
    budgets: tuple[float, ...]
    """Budgets whose optimum was used."""
    samples: tuple[tuple[float, float], ...] = ()
    """log(factor) and exponent of each bootstrap sample; a factor itself may overflow."""

    def __call__(self, flops: np.ndarray | float) -> np.ndarray:
        return self.factor * np.asarray(flops, dtype=float) ** self.exponent

    def sample_exponents(self) -> np.ndarray:
        return np.array([exponent for _, exponent in self.samples])

    def sample_optima(self, flops: float) -> np.ndarray:
        """The optimum at `flops` in each bootstrap sample."""
        logs = [factor + exponent * np.log(flops) for factor, exponent in self.samples]
        with np.errstate(over="ignore"):
            return np.exp(np.array(logs))


def fit_parabolas(where: np.ndarray, loss: np.ndarray, budget: np.ndarray) -> list[Parabola]:
    """One parabola per budget with `MIN_PARABOLA_POINTS` or more different values of `where`, mu
    or D."""
    parabolas = []
    for value in np.unique(budget):
        rows = budget == value
        logs = np.log(where[rows])
        if len(np.unique(logs)) < MIN_PARABOLA_POINTS:
            continue
        centre = float(logs.mean())
        quadratic, linear, constant = np.polyfit(logs - centre, loss[rows], 2)
        parabolas.append(
            Parabola(
                budget=float(value),
                coefficients=(float(constant), float(linear), float(quadratic)),
                centre=centre,
                low=float(where[rows].min()),
                high=float(where[rows].max()),
            )
        )
    if not parabolas:
        most = max((len(np.unique(where[budget == v])) for v in np.unique(budget)), default=0)
        raise FitError(
            f"no budget has looped runs at {MIN_PARABOLA_POINTS} or more depths; "
            f"the most is {most}. mean_loops = 1 is fixed depth, a baseline, and does not count. "
            "Train more values of mean_loops above 1 at the same FLOPs."
        )
    return parabolas


def fit_power_law(parabolas: list[Parabola]) -> PowerLaw:
    """A power law through the optima that lie within their runs."""
    used = [parabola for parabola in parabolas if parabola.is_inside]
    if len(used) < 2:
        raise FitError(
            f"the optimum lies within the runs at {len(used)} of "
            f"{format_items(len(parabolas), 'budget')}, and a line needs two. "
            "Widen the range of mean_loops, or add budgets."
        )
    budgets = np.log([parabola.budget for parabola in used])
    optima = np.log([parabola.optimum for parabola in used])
    exponent, constant = np.polyfit(budgets, optima, 1)
    return PowerLaw(
        float(np.exp(constant)), float(exponent), tuple(parabola.budget for parabola in used)
    )


def add_samples(law: PowerLaw, samples: list[list[Parabola]]) -> PowerLaw:
    """The power law with its bootstrap samples; none if fewer than half of them have one."""
    pairs = []
    for parabolas in samples:
        try:
            drawn = fit_power_law(parabolas)
        except FitError:
            continue
        if drawn.factor > 0:
            pairs.append((float(np.log(drawn.factor)), drawn.exponent))
    return replace(law, samples=tuple(pairs) if 2 * len(pairs) >= len(samples) else ())


def bootstrap_parabolas(
    parabolas: list[Parabola],
    where: np.ndarray,
    loss: np.ndarray,
    budget: np.ndarray,
    samples: int,
    seed: int = 0,
) -> list[list[Parabola]]:
    """Parabolas of bootstrap samples: the residuals of all budgets, resampled."""
    rng = np.random.default_rng(seed)
    predicted, residuals = np.full(len(loss), np.nan), []
    for parabola in parabolas:
        rows = budget == parabola.budget
        predicted[rows] = parabola.loss(where[rows])
        count = int(rows.sum())
        residuals.append((loss[rows] - predicted[rows]) * np.sqrt(count / max(count - 3, 1)))
    known = np.isfinite(predicted)
    pool = np.concatenate(residuals)
    return [
        fit_parabolas(
            where[known], predicted[known] + rng.choice(pool, int(known.sum())), budget[known]
        )
        for _ in range(samples)
    ]


def parabola_warnings(parabolas: list[Parabola]) -> list[str]:
    """One message for each parabola in mean_loops without an optimum within its runs."""
    messages = []
    for parabola in parabolas:
        name = f"parabola at {format_flops(parabola.budget)} FLOPs"
        if not parabola.is_convex:
            messages.append(f"{name} opens downwards: its runs show no optimum.")
        elif not parabola.is_inside:
            side = "below" if parabola.optimum < parabola.low else "above"
            messages.append(
                f"{name}: its optimum is {side} the grid "
                f"({parabola.low:g} to {parabola.high:g} loops) and is not used for the power law. "
                "Extend the grid to determine it."
            )
    return messages


def power_law_warnings(name: str, law: PowerLaw) -> list[str]:
    """A message if the power law has no bootstrap samples."""
    if law.samples:
        return []
    return [
        f"power law of {name}: most bootstrap samples have fewer than two optima within the runs, "
        "so it has no interval. Widen the range of mean_loops."
    ]


def frontier(values: Values, cost: CostModel, flops: float) -> tuple[np.ndarray, np.ndarray]:
    """The optimal mean_loops under the training law and the loss there, per row of parameters."""
    loops = cost.loops_grid()
    at = cost.points_at(loops, flops / cost.smooth_flops_per_token(loops))
    losses = np.atleast_2d(TRAINING.predict(training_part(values), at))
    return _lowest(np.log(loops), losses, np.exp)


@dataclass(frozen=True)
class Optimum:
    """The best use of a FLOP budget by the training law: the loss is that at T = mu."""

    loops: Estimate
    tokens: Estimate
    loss: Estimate


def optimum(training: LawResult, cost: CostModel, flops: float) -> Optimum:
    """The lowest loss of the training law at this budget, with intervals."""
    sets = (
        [training.values]
        if training.samples is None
        else [
            training.values,
            training.samples.values,
        ]
    )
    pairs = [frontier(values, cost, flops) for values in sets]
    loops, losses = zip(*pairs, strict=True)
    tokens = [flops / cost.smooth_flops_per_token(part) for part in loops]
    return Optimum(*(_with_interval(quantity) for quantity in (loops, tokens, losses)))


def _with_interval(parts: Sequence[np.ndarray]) -> Estimate:
    """From the value of the fit, and those of the bootstrap samples if there are any."""
    value = float(parts[0][0])
    return Estimate(value) if len(parts) == 1 else Estimate(value, *interval(parts[1]))


def flops_for(values: Values, cost: CostModel, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest FLOPs that reach a loss and their mean_loops; infinite if it is never reached.

    The tokens needed at each depth follow in closed form.
    """
    loops = cost.loops_grid()
    rows = {name: np.atleast_1d(values[name])[:, None] for name in TRAINING.parameters}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        floor = rows["E"] + rows["X"] * cost.effective_params(loops) ** -rows["x"]
        left = loss - floor
        log_tokens = (np.log(rows["Y"]) - np.log(left)) / rows["y"]
        logs = log_tokens + np.log(cost.smooth_flops_per_token(loops))
    logs = np.where(left > 0, logs, np.inf)
    best_loops, best = _lowest(np.log(loops), logs, np.exp)
    with np.errstate(over="ignore"):
        return np.exp(best), best_loops


def training_part(values: Values) -> dict[str, float | np.ndarray]:
    """The parameters of the training law within those of a unified law."""
    return {name: values[name] for name in TRAINING.parameters}


def _lowest(
    where: np.ndarray, heights: np.ndarray, inverse: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The minimum of each row, refined by a parabola through three grid points.

    A minimum at an end of the grid is the value there, not that of a vertex beyond it.
    """
    lowest = heights.argmin(1)
    middle = np.clip(lowest, 1, len(where) - 2)
    row = np.arange(len(heights))
    left, centre, right = (heights[row, middle + step] for step in (-1, 0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        bend = left - 2 * centre + right
        shift = np.where(bend > 0, 0.5 * (left - right) / bend, lowest - middle)
        shift = np.clip(np.where(np.isfinite(shift), shift, 0.0), -1.0, 1.0)
        height = centre + shift * (0.5 * (right - left) + 0.5 * bend * shift)
    height = np.where(np.isfinite(height), height, heights.min(1))
    return inverse(where[middle] + shift * (where[1] - where[0])), height


@dataclass(frozen=True)
class FixedDepth:
    """The best looped run at one budget, the optimum of the law, and the run at mu = 1."""

    budget: float
    best_loops: float
    best_loss: float
    fixed_loss: float | None
    law_loops: Estimate | None
    law_loss: Estimate | None


def compare_fixed_depth(runs: ModelRuns, training: LawResult | None) -> list[FixedDepth]:
    """Looping compared with fixed depth at each budget."""
    rows = []
    grid, baselines, cost = runs.training(), runs.baselines(), runs.cost
    for budget in runs.budgets:
        here = grid & (runs.budget == budget)
        if not here.any():
            continue
        best = np.flatnonzero(here)[runs.points.loss[here].argmin()]
        fixed = runs.points.loss[baselines & (runs.budget == budget)]
        best_by_law = None if training is None else optimum(training, cost, float(budget))
        rows.append(
            FixedDepth(
                budget=float(budget),
                best_loops=float(runs.points.mean_loops[best]),
                best_loss=float(runs.points.loss[best]),
                fixed_loss=float(fixed.min()) if len(fixed) else None,
                law_loops=None if best_by_law is None else best_by_law.loops,
                law_loss=None if best_by_law is None else best_by_law.loss,
            )
        )
    return rows
