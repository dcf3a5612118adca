"""The runs of one model: the points laws are fitted to, their cost, and what each run is used for.

    grid         looped runs at FLOP budgets with at least three depths: laws are fitted to these
    curve        runs of the same number of tokens at three or more depths (fixed data)
    end-to-end   all other runs
    baselines    runs with mean_loops = 1 (fixed depth), of any set

A column `set` of the table overrides this rule. Looped runs outside the grid are held out: laws are
tested on them. A column `role` overrides which runs are fitted. If no run is in the grid, laws are
fitted to all looped runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from parcae.console import format_flops, format_items
from parcae.laws.table import COLUMNS, RUN_KEYS, SCORES, TOKENS_TOLERANCE, FitError, Table

MAX_SEARCHED_LOOPS = 256.0
"""Optima are searched for up to this mean_loops."""
LOOP_GRID_SIZE = 600
BUDGET_TOLERANCE = 0.02
"""Relative difference up to which FLOPs are one budget: steps are whole numbers."""
LOSS_TOLERANCE = 1e-9
COST_TOLERANCE = 0.01
"""Largest relative error of FLOPs per token by the rule ceil(mu / 2) for a table that follows it:
tables may be rounded to two or three digits."""
MIN_GRID_LOOPS = 3
NOT_SETTINGS = {*COLUMNS, *RUN_KEYS, *SCORES, "role", "set", "budget", "eval_limit"}
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


def make_points(
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
class CostModel:
    """N(mu), which is linear in mu, and training FLOPs per token, estimated from a table.

    FLOPs per token are flops + (mu + 2 mu_bwd) * flops_per_loop: a loop costs one forward pass, and
    two more if it has gradient. In a table that follows the paper's rule, mu_bwd = ceil(mu / 2).
    Other tables are interpolated between their depths.
    """

    params: float
    """N(1): all parameters once."""
    params_per_loop: float
    flops: float
    """Training FLOPs per token outside the loop."""
    flops_per_loop: float
    """FLOPs per token of one forward pass through the loop."""
    measured: Mapping[float, tuple[float, float]]
    """By mean_loops: N(mu) and FLOPs per token in the table."""
    half_with_gradient: bool = True
    """Whether mu_bwd = ceil(mu / 2) gives the FLOPs of every depth in the table."""

    def effective_params(self, loops: np.ndarray | float) -> np.ndarray:
        return self.params + (np.asarray(loops, dtype=float) - 1) * self.params_per_loop

    def flops_per_token(self, loops: np.ndarray | float) -> np.ndarray:
        """Training FLOPs per token of a run, with ceil(mu / 2) loops with gradient."""
        loops = np.asarray(loops, dtype=float)
        return self._flops(loops, np.ceil(loops / 2))

    def smooth_flops_per_token(self, loops: np.ndarray | float) -> np.ndarray:
        """FLOPs per token as a continuous function of mu, over which optima are searched for.

        mu_bwd is max(1, mu / 2): exact below 2 and at every even mu, the lower bound between.
        """
        loops = np.asarray(loops, dtype=float)
        return self._flops(loops, np.maximum(1.0, loops / 2))

    def _flops(self, loops: np.ndarray, gradient_loops: np.ndarray) -> np.ndarray:
        if self.half_with_gradient:
            return self.flops + (loops + 2 * gradient_loops) * self.flops_per_loop
        depths = np.array(sorted(self.measured))
        costs = np.array([self.measured[float(depth)][1] for depth in depths])
        if len(depths) == 1:
            return np.broadcast_to(costs, loops.shape).copy()
        segment = np.clip(np.searchsorted(depths, loops, side="right") - 1, 0, len(depths) - 2)
        slopes = np.diff(costs) / np.diff(depths)
        return costs[segment] + slopes[segment] * (loops - depths[segment])

    def points_at(self, loops: object, tokens: object, test_loops: object = None) -> Points:
        """Points at which a law can be evaluated; their losses are placeholders."""
        loops, tokens = np.broadcast_arrays(
            np.asarray(loops, dtype=float), np.asarray(tokens, dtype=float)
        )
        test = loops if test_loops is None else np.asarray(test_loops, dtype=float)
        test = np.broadcast_to(test, loops.shape)
        return make_points(
            loss=np.ones(loops.size),
            effective_params=self.effective_params(loops).ravel(),
            tokens=tokens.ravel(),
            mean_loops=loops.ravel(),
            test_loops=test.ravel(),
        )

    def loops_grid(self, highest: float = MAX_SEARCHED_LOOPS) -> np.ndarray:
        """mean_loops from 1 to `highest` at which optima are searched for."""
        return np.geomspace(1.0, highest, LOOP_GRID_SIZE)


def cost_model_from(
    mean_loops: np.ndarray, params: np.ndarray, flops_per_token: np.ndarray
) -> CostModel:
    """The costs of a model from its runs; N(mu) from the looped ones if there are two or more."""
    measured = {}
    for loops in np.unique(mean_loops):
        here = mean_loops == loops
        measured[float(loops)] = (
            float(np.median(params[here])),
            float(np.median(flops_per_token[here])),
        )
    depths = np.array(list(measured))
    sizes, costs = np.array(list(measured.values())).T
    if len(depths) == 1:
        return CostModel(float(sizes[0]), 0.0, float(costs[0]), 0.0, measured, False)
    looped = depths > 1 if (depths > 1).sum() >= 2 else depths > 0
    slope, at_zero = np.polyfit(depths[looped], sizes[looped], 1)
    passes = depths + 2 * np.ceil(depths / 2)
    per_loop, outside = np.polyfit(passes, costs, 1)
    errors = np.abs((outside + passes * per_loop) / costs - 1)
    follows_rule = bool(errors.max() <= COST_TOLERANCE and per_loop > 0)
    return CostModel(
        params=float(at_zero + slope),
        params_per_loop=float(slope),
        flops=float(outside),
        flops_per_loop=float(per_loop),
        measured=measured,
        half_with_gradient=follows_rule,
    )


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
    cost: CostModel
    sets: np.ndarray
    """For each row the set its run belongs to, of `table.SETS`."""
    mixed: tuple[str, ...] = ()
    """Settings that differ between fitted runs of the same loops and FLOPs."""
    chosen: tuple[str, ...] = ()
    """What was chosen where runs of the same loops and FLOPs differed in a setting."""

    @property
    def nominal_mask(self) -> np.ndarray:
        """Mask of the rows measured at T = mu."""
        return self.points.test_loops == np.maximum(1, np.round(self.points.mean_loops))

    @property
    def looped_mask(self) -> np.ndarray:
        return self.points.mean_loops > 1

    @property
    def budgets(self) -> np.ndarray:
        """The FLOP budgets of the fitted runs."""
        return np.unique(self.budget[self.fitted])

    def training(self) -> np.ndarray:
        """Mask of the rows the training law is fitted to."""
        return self.fitted & self.nominal_mask

    def held_out(self) -> np.ndarray:
        return self.looped_mask & ~self.fitted

    def in_set(self, name: str) -> np.ndarray:
        """Mask of the rows of looped runs in this set."""
        return self.looped_mask & (self.sets == name)

    def baselines(self) -> np.ndarray:
        return ~self.looped_mask & self.nominal_mask

    def curves(self, rows: np.ndarray, fewest: int) -> list[Points]:
        """The losses by T of each looped run among `rows` with at least `fewest` of them."""
        points = self.points.take(rows & self.looped_mask)
        curves = [points.take(mask) for _, mask in points.runs()]
        ordered = [curve.take(np.argsort(curve.test_loops)) for curve in curves]
        return [curve for curve in ordered if len(curve) >= fewest]

    def check_training(self) -> None:
        """Raise if depths, budgets or losses at T = mu that the training law needs are missing."""
        points = self.points.take(self.fitted)
        if not len(points):
            which = " with role 'fit'" if self.looped_mask.any() else ""
            raise FitError(
                f"{self.model}: no looped runs{which}. Add runs with mean_loops above 1."
            )
        nominal = self.points.take(self.training())
        lacking = sorted(set(points.run.tolist()) - set(nominal.run.tolist()))
        if lacking:
            loops = sorted({float(points.mean_loops[points.run == run][0]) for run in lacking})
            listed = ", ".join(f"{number:g}" for number in loops)
            raise FitError(
                f"{self.model}: no loss at test_loops = mean_loops of "
                f"{format_items(len(lacking), 'run')} (mean_loops {listed}). Measure it there."
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
        if len(losses) > 1 and np.ptp(losses) <= LOSS_TOLERANCE * losses.mean():
            raise FitError(
                f"{self.model}: all {len(losses)} losses at test_loops = mean_loops are "
                f"{losses[0]:g}, which determines no law. Check how they were measured."
            )

    def mixed_settings(self) -> list[str]:
        """What was chosen where runs also vary in, for example, the learning rate; a warning if
        laws are fitted to all of them."""
        if not self.mixed:
            return [*self.chosen]
        return [
            *self.chosen,
            f"runs of the same loops and FLOPs differ in {', '.join(self.mixed)}, and laws are "
            "fitted to all of them. Remove the worse ones, or set 'held-out' in a column 'role'.",
        ]

    def check_test_time(self) -> None:
        """Raise if no run was measured at several T."""
        points = self.points.take(self.looped_mask)
        if not len(points):
            raise FitError(f"{self.model}: no looped runs. Add runs with mean_loops above 1.")
        most = max(int(mask.sum()) for _, mask in points.runs())
        if most == 1:
            raise FitError(
                f"{self.model}: every run has a loss at a single test_loops, so there is no curve. "
                "Measure runs at several, such as 1, 2, 4, 6, 8, 12, 16."
            )


def runs_of_model(table: Table, model: str, best_of: Sequence[str] | None = None) -> ModelRuns:
    """The rows of `model`, divided into fitted, held-out and baseline runs.

    Of runs with the same loops and FLOPs that differ in the columns `best_of` (default: in any
    setting; none for an empty list) only those of the best setting are kept.
    """
    rows = np.flatnonzero(np.array([name == model for name in table["model"].tolist()]))
    best, chosen = _best_rows(table, rows, best_of)
    rows = rows[best]
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
    if "set" in table:
        sets = table["set"][rows]
    else:
        sets = assign_sets(points.mean_loops, points.tokens, budget)
    if "role" in table:
        fitted = looped & (table["role"][rows] == "fit")
    else:
        fitted = looped & (sets == "grid")
        fitted = fitted if fitted.any() else looped
    cost = cost_model_from(points.mean_loops, points.effective_params, flops / points.tokens)
    cells = list(zip(points.mean_loops[fitted].tolist(), budget[fitted].tolist(), strict=True))
    mixed = _mixed(table, rows[fitted], points.run[fitted], cells)
    return ModelRuns(model, points, flops, budget, fitted, cost, sets, mixed, chosen)


def _best_rows(
    table: Table, rows: np.ndarray, best_of: Sequence[str] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Mask of the rows whose setting has the lowest loss at T = mu, the mean over seeds, among the
    runs with the same loops, FLOPs, set and role; and what was chosen, in words."""
    loops, runs = table["mean_loops"][rows], table.run[rows]
    budget = group_budgets(table["budget" if "budget" in table else "flops"][rows])
    kinds = [table[name][rows].tolist() for name in ("set", "role") if name in table]
    cells = list(zip(loops.tolist(), budget.tolist(), *kinds, strict=True))
    names = _mixed(table, rows, runs, cells) if best_of is None else tuple(best_of)
    if unknown := [name for name in names if name not in table]:
        raise FitError(f"best_of: no column {unknown[0]!r}. Columns: {', '.join(table.columns)}.")
    best = np.ones(len(rows), dtype=bool)
    if not names:
        return best, ()
    settings = list(zip(*(table[name][rows].tolist() for name in names), strict=True))
    nominal = table["test_loops"][rows] == np.maximum(1, np.round(loops))
    losses: dict[Any, dict[Any, list[float]]] = {}
    for cell, setting, loss, counts in zip(
        cells, settings, table["loss"][rows], nominal, strict=True
    ):
        of_setting = losses.setdefault(cell, {}).setdefault(setting, [])
        of_setting += [float(loss)] if counts else []
    winners = {
        cell: min(found, key=lambda setting: np.mean(found[setting]))
        for cell, of_cell in losses.items()
        if (found := {setting: values for setting, values in of_cell.items() if values})
        and len(of_cell) > 1
    }
    if not winners:
        return best, ()
    pairs = zip(cells, settings, strict=True)
    best = np.array([winners.get(cell, setting) == setting for cell, setting in pairs])
    counts = Counter(winners.values())
    listed = "; ".join(
        f"{', '.join(f'{name} {value}' for name, value in zip(names, setting, strict=True))} "
        f"at {number} of {len(winners)} points"
        for setting, number in counts.most_common()
    )
    return best, (
        f"runs of the same loops and FLOPs differ in {', '.join(names)}; laws are fitted to the "
        f"best of them by the loss at T = mean_loops: {listed}.",
    )


def _mixed(
    table: Table, rows: np.ndarray, runs: np.ndarray, cells: Sequence[Any]
) -> tuple[str, ...]:
    """Columns constant within each run that differ between runs of the same loops and budget; of
    columns that say the same, such as a rate and its logarithm, the first."""
    mixed, seen = [], set()
    for name in (name for name in table.columns if name not in NOT_SETTINGS):
        values = [str(value) for value in table[name][rows].tolist()]
        by_run = set(zip(runs.tolist(), values, strict=True))
        by_cell = set(zip(cells, values, strict=True))
        order = {value: index for index, value in enumerate(dict.fromkeys(values))}
        division = tuple(order[value] for value in values)
        is_setting = len(by_run) == len(set(runs.tolist())) and division not in seen
        if is_setting and len(by_cell) > len(set(cells)):
            mixed.append(name)
            seen.add(division)
    return tuple(mixed)


def assign_sets(mean_loops: np.ndarray, tokens: np.ndarray, flops: np.ndarray) -> np.ndarray:
    """The set of each run (or row) of one model, by the rule of this module."""
    in_grid = _has_depths(mean_loops, group(flops, 1 + BUDGET_TOLERANCE))
    in_curve = _has_depths(mean_loops, group(tokens, 1 + TOKENS_TOLERANCE), ~in_grid)
    return np.where(in_grid, "grid", np.where(in_curve, "curve", "end-to-end")).astype(object)


def _has_depths(
    loops: np.ndarray, groups: np.ndarray, among: np.ndarray | bool = True
) -> np.ndarray:
    """Mask of the rows (`among` these) whose group has three looped depths."""
    rows = np.broadcast_to(among, loops.shape)
    full = [
        value
        for value in np.unique(groups)
        if len(np.unique(loops[rows & (loops > 1) & (groups == value)])) >= MIN_GRID_LOOPS
    ]
    return rows & np.isin(groups, full)


def group(values: np.ndarray, gap: float) -> np.ndarray:
    """For each value the index of its group, in rising order; larger gaps separate groups."""
    order = np.argsort(values, kind="stable")
    groups = np.empty(len(values), dtype=int)
    steps = np.diff(np.log(values[order])) > np.log(gap)
    groups[order] = np.concatenate(([0], np.cumsum(steps)))
    return groups


def group_budgets(flops: np.ndarray) -> np.ndarray:
    """For each row the geometric mean of its group; gaps above the tolerance separate groups."""
    order = np.argsort(flops, kind="stable")
    logs, groups = np.log(flops[order]), group(flops, 1 + BUDGET_TOLERANCE)[order]
    means = np.bincount(groups, logs) / np.bincount(groups)
    budget = np.empty_like(flops, dtype=float)
    budget[order] = np.exp(means)[groups]
    return np.array([float(f"{value:.4g}") for value in budget])
