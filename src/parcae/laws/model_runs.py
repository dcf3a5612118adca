"""The runs of one model: the points laws are fitted to, their cost, and what each run is used for.

    grid        looped runs at FLOP budgets with at least three depths: laws are fitted to these
    baselines   runs with mean_loops = 1 (fixed depth)
    held-out    other looped runs: laws are tested on these

A column `role` of the table overrides grid and held-out. If no budget has three depths, laws are
fitted to all looped runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from parcae.console import format_flops
from parcae.laws.table import COLUMNS, RUN_KEYS, FitError, Table

MAX_LOOPS = 256.0
"""Optima are searched for up to this mean_loops."""
LOOP_GRID_SIZE = 600
SAME_BUDGET = 1.02
"""Runs whose FLOPs differ by less than this factor share a budget: steps are whole numbers."""
SAME_LOSS = 1e-9
MIN_DEPTHS_OF_GRID = 3
NOT_SETTINGS = {*COLUMNS, *RUN_KEYS, "role", "budget", "core", "core_extended"}
"""Columns that are measured, or only distinguish runs."""


@dataclass(frozen=True)
class Points:
    """Arrays of equal length, one entry per measured loss."""

    effective_params: np.ndarray
    """N(mu): parameters of the model with its core unrolled mean_loops times."""
    tokens: np.ndarray
    mean_loops: np.ndarray
    """mu: mean loops in training."""
    test_loops: np.ndarray
    """T: loops used when the loss was measured."""
    loss: np.ndarray
    run: np.ndarray
    """Index of the run: the errors of one run's losses are correlated."""

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows: np.ndarray) -> Points:
        """The points at these indices, or where this mask is true."""
        return Points(*(getattr(self, field.name)[rows] for field in fields(self)))

    def runs(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the index of each run and the mask of its points."""
        for run in np.unique(self.run):
            yield int(run), self.run == run


def points(
    *,
    loss: object,
    effective_params: object = 1.0,
    tokens: object = 1.0,
    mean_loops: object = 1.0,
    test_loops: object = None,
    run: object = None,
) -> Points:
    """`Points` from array-likes. Defaults: 1 for N, D and mu, T = mu, one run per point."""
    losses = np.asarray(loss, dtype=float)

    def column(values: object) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, dtype=float), losses.shape).copy()

    loops = column(mean_loops)
    return Points(
        effective_params=column(effective_params),
        tokens=column(tokens),
        mean_loops=loops,
        test_loops=loops if test_loops is None else column(test_loops),
        loss=losses,
        run=np.arange(losses.size) if run is None else np.asarray(run),
    )


@dataclass(frozen=True)
class Shape:
    """N(mu) and FLOPs per token as linear functions of mu, estimated from a table.

    FLOPs per token follow the paper's rule mu_bwd = ceil(mu / 2) at even mu, where it is exactly
    half; an odd mu costs one loop's backward pass more. Between fixed depth (mu = 1) and the
    shallowest looped runs, FLOPs are interpolated.
    """

    params: float
    """N(1): all parameters once."""
    params_per_loop: float
    flops: float
    """Training FLOPs per token outside the loop."""
    flops_per_loop: float
    measured: Mapping[float, tuple[float, float]]
    """By mean_loops: N(mu) and FLOPs per token in the table."""

    def effective_params(self, loops: np.ndarray | float) -> np.ndarray:
        return self.params + (np.asarray(loops, dtype=float) - 1) * self.params_per_loop

    def flops_per_token(self, loops: np.ndarray | float) -> np.ndarray:
        loops = np.asarray(loops, dtype=float)
        line = self.flops + loops * self.flops_per_loop
        first = min((depth for depth in self.measured if depth > 1), default=1.0)
        if 1.0 not in self.measured or first == 1.0:
            return line
        ends = (self.measured[1.0][1], self.flops + first * self.flops_per_loop)
        return np.where(loops < first, np.interp(loops, (1.0, first), ends), line)

    def points(self, loops: object, tokens: object, test_loops: object = None) -> Points:
        """Points at which a law can be evaluated; their losses are placeholders."""
        loops, tokens = np.broadcast_arrays(
            np.asarray(loops, dtype=float), np.asarray(tokens, dtype=float)
        )
        test = loops if test_loops is None else np.asarray(test_loops, dtype=float)
        test = np.broadcast_to(test, loops.shape)
        return points(
            loss=np.ones(loops.size),
            effective_params=self.effective_params(loops).ravel(),
            tokens=tokens.ravel(),
            mean_loops=loops.ravel(),
            test_loops=test.ravel(),
        )

    def loops_grid(self, highest: float = MAX_LOOPS) -> np.ndarray:
        """mean_loops from 1 to `highest` at which optima are searched for."""
        return np.geomspace(1.0, highest, LOOP_GRID_SIZE)


def shape_from(mean_loops: np.ndarray, params: np.ndarray, flops_per_token: np.ndarray) -> Shape:
    """Least-squares lines through the measured depths, of looped runs if there are two or more."""
    measured = {}
    for loops in np.unique(mean_loops):
        here = mean_loops == loops
        measured[float(loops)] = (
            float(np.median(params[here])),
            float(np.median(flops_per_token[here])),
        )
    depths = np.array(list(measured))
    looped = depths[depths > 1] if (depths > 1).sum() >= 2 else depths
    pairs = np.array([measured[float(loops)] for loops in looped])
    if len(looped) == 1:
        return Shape(pairs[0, 0], 0.0, pairs[0, 1], 0.0, measured)
    slope_n, at_zero = np.polyfit(looped, pairs[:, 0], 1)
    slope_f, flops = np.polyfit(looped, pairs[:, 1], 1)
    return Shape(float(at_zero + slope_n), float(slope_n), float(flops), float(slope_f), measured)


@dataclass(frozen=True)
class ModelRuns:
    """The rows of one model in a table."""

    model: str
    points: Points
    flops: np.ndarray
    budget: np.ndarray
    """For each row the geometric mean of the FLOPs of all runs with the same budget."""
    fitted: np.ndarray
    """Mask of the rows that laws are fitted to: looped runs only."""
    shape: Shape
    mixed: tuple[str, ...] = ()
    """Settings that differ between fitted runs of the same loops and FLOPs."""

    @property
    def is_nominal(self) -> np.ndarray:
        """Mask of the rows measured at T = mu."""
        return self.points.test_loops == np.maximum(1, np.round(self.points.mean_loops))

    @property
    def is_looped(self) -> np.ndarray:
        return self.points.mean_loops > 1

    @property
    def budgets(self) -> np.ndarray:
        """The FLOP budgets of the fitted runs."""
        return np.unique(self.budget[self.fitted])

    def training(self) -> np.ndarray:
        """Mask of the rows the training law is fitted to."""
        return self.fitted & self.is_nominal

    def held_out(self) -> np.ndarray:
        return self.is_looped & ~self.fitted

    def baselines(self) -> np.ndarray:
        return ~self.is_looped & self.is_nominal

    def curves(self, rows: np.ndarray, fewest: int) -> list[Points]:
        """The losses by T of each looped run among `rows` with at least `fewest` of them."""
        points = self.points.take(rows & self.is_looped)
        curves = [points.take(mask) for _, mask in points.runs()]
        ordered = [curve.take(np.argsort(curve.test_loops)) for curve in curves]
        return [curve for curve in ordered if len(curve) >= fewest]

    def check_training(self) -> None:
        """Raise if depths, budgets or losses at T = mu that the training law needs are missing."""
        points = self.points.take(self.fitted)
        if not len(points):
            which = " with role 'fit'" if self.is_looped.any() else ""
            raise FitError(
                f"{self.model}: no looped runs{which}. Add runs with mean_loops above 1."
            )
        nominal = self.points.take(self.training())
        lacking = sorted(set(points.run.tolist()) - set(nominal.run.tolist()))
        if lacking:
            loops = sorted({float(points.mean_loops[points.run == run][0]) for run in lacking})
            listed = ", ".join(f"{number:g}" for number in loops)
            raise FitError(
                f"{self.model}: {len(lacking)} runs, with mean_loops {listed}, have no loss "
                "measured at test_loops = mean_loops. Measure them there."
            )
        depths = np.unique(nominal.mean_loops)
        if len(depths) < 2:
            raise FitError(
                f"{self.model}: all runs have mean_loops {depths[0]:g}, so the effect of looping "
                "is not determined. Train with at least three values."
            )
        budgets = np.unique(self.budget[self.training()])
        if len(budgets) < 2:
            raise FitError(
                f"{self.model}: all runs have one budget, {format_flops(budgets[0])} FLOPs, at "
                "which more loops always mean fewer tokens, so their effects cannot be separated. "
                "Add a second budget."
            )
        self.check_losses()

    def check_losses(self) -> None:
        """Raise if all losses at T = mu are equal: any law whose terms vanish would fit them."""
        losses = self.points.loss[self.training()]
        if len(losses) > 1 and np.ptp(losses) <= SAME_LOSS * losses.mean():
            raise FitError(
                f"{self.model}: all {len(losses)} losses at test_loops = mean_loops are "
                f"{losses[0]:g}, which determines no law. Check how they were measured."
            )

    def mixed_settings(self) -> list[str]:
        """A warning if the fitted runs also vary in, for example, the learning rate."""
        if not self.mixed:
            return []
        return [
            f"runs of the same loops and FLOPs differ in {', '.join(self.mixed)}, and laws are "
            "fitted to all of them. Remove the worse ones, or set 'held-out' in a column 'role'."
        ]

    def check_test_time(self) -> None:
        """Raise if no run was measured at several T."""
        points = self.points.take(self.is_looped)
        if not len(points):
            raise FitError(f"{self.model}: no looped runs. Add runs with mean_loops above 1.")
        most = max(int(mask.sum()) for _, mask in points.runs())
        if most == 1:
            raise FitError(
                f"{self.model}: every run has a loss at a single test_loops, so there is no curve. "
                "Measure runs at several, such as 1, 2, 4, 6, 8, 12, 16."
            )


def runs_of_model(table: Table, model: str) -> ModelRuns:
    """The rows of `model`, divided into fitted, held-out and baseline runs."""
    rows = np.flatnonzero(np.array([name == model for name in table["model"].tolist()]))
    points = Points(
        effective_params=table["effective_params"][rows],
        tokens=table["tokens"][rows],
        mean_loops=table["mean_loops"][rows],
        test_loops=table["test_loops"][rows],
        loss=table["loss"][rows],
        run=table.run[rows],
    )
    flops = table["flops"][rows]
    budget = group_budgets(table["budget"][rows] if "budget" in table else flops)
    looped = points.mean_loops > 1
    if "role" in table:
        fitted = looped & (table["role"][rows] == "fit")
    else:
        fitted = looped & _in_a_grid(points.mean_loops, budget, looped)
        fitted = fitted if fitted.any() else looped
    shape = shape_from(points.mean_loops, points.effective_params, flops / points.tokens)
    mixed = _mixed(table, rows[fitted], points.take(fitted), budget[fitted])
    return ModelRuns(model, points, flops, budget, fitted, shape, mixed)


def _mixed(table: Table, rows: np.ndarray, points: Points, budget: np.ndarray) -> tuple[str, ...]:
    """Columns constant within each run that differ between runs of the same loops and budget."""
    mixed = []
    cells = list(zip(points.mean_loops.tolist(), budget.tolist(), strict=True))
    for name in (name for name in table.columns if name not in NOT_SETTINGS):
        values = [str(value) for value in table[name][rows].tolist()]
        by_run = set(zip(points.run.tolist(), values, strict=True))
        by_cell = set(zip(cells, values, strict=True))
        if len(by_run) == len(set(points.run.tolist())) and len(by_cell) > len(set(cells)):
            mixed.append(name)
    return tuple(mixed)


def group_budgets(flops: np.ndarray) -> np.ndarray:
    """For each row the geometric mean of its group; gaps above `SAME_BUDGET` separate groups."""
    order = np.argsort(flops, kind="stable")
    logs = np.log(flops[order])
    group = np.concatenate(([0], np.cumsum(np.diff(logs) > np.log(SAME_BUDGET))))
    means = np.bincount(group, logs) / np.bincount(group)
    budget = np.empty_like(flops, dtype=float)
    budget[order] = np.exp(means)[group]
    return np.array([float(f"{value:.4g}") for value in budget])


def _in_a_grid(loops: np.ndarray, budget: np.ndarray, looped: np.ndarray) -> np.ndarray:
    full = [
        value
        for value in np.unique(budget)
        if len(np.unique(loops[looped & (budget == value)])) >= MIN_DEPTHS_OF_GRID
    ]
    return np.isin(budget, full)
