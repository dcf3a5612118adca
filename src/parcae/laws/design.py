"""What the runs of one model are good for: grid, baselines, held-out, curves.

    grid        looped runs at FLOP budgets that hold at least three depths: laws learn from these
    baselines   runs with mean_loops = 1: fixed depth
    held-out    other looped runs: laws are tried on these

A column `role` overrides the first and the last. Where no budget holds three depths, the design is
free, and laws learn from all looped runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parcae.laws.fit import FitError
from parcae.laws.points import Points
from parcae.laws.shape import Shape, shape_from
from parcae.laws.table import COLUMNS, IDENTITY, Table

SAME_BUDGET = 1.02
"""Runs whose FLOPs differ by less than this factor had one budget: steps are whole."""
SAME_LOSS = 1e-9
DEPTHS_FOR_A_GRID = 3
NO_SETTINGS = {*COLUMNS, *IDENTITY, "role", "budget", "core", "core_extended"}
"""Columns that are measured, or only tell runs apart."""
TRANSFORMER = "transformer"


@dataclass(frozen=True)
class Design:
    """The rows of one model."""

    model: str
    points: Points
    flops: np.ndarray
    budget: np.ndarray
    """Of each row: the mean FLOPs of the runs that share it."""
    learns: np.ndarray
    """Rows that laws learn from: of looped runs only."""
    shape: Shape
    mixed: tuple[str, ...] = ()
    """Settings in which runs differ that laws learn from and that have the same loops and FLOPs."""

    @property
    def is_nominal(self) -> np.ndarray:
        """Rows measured with as many loops as the mean in training."""
        return self.points.test_loops == np.maximum(1, np.round(self.points.mean_loops))

    @property
    def is_looped(self) -> np.ndarray:
        return self.points.mean_loops > 1

    @property
    def budgets(self) -> np.ndarray:
        """Of the runs that laws learn from."""
        return np.unique(self.budget[self.learns])

    def training(self) -> np.ndarray:
        return self.learns & self.is_nominal

    def held_out(self) -> np.ndarray:
        return self.is_looped & ~self.learns

    def baselines(self) -> np.ndarray:
        return ~self.is_looped & self.is_nominal

    def curves(self, rows: np.ndarray, fewest: int) -> list[Points]:
        """Losses by T of each run among `rows` that has at least `fewest` of them."""
        chosen = self.points.take(rows & self.is_looped)
        parts = [chosen.take(mask) for _, mask in chosen.runs()]
        ordered = [part.take(np.argsort(part.test_loops)) for part in parts]
        return [part for part in ordered if len(part) >= fewest]

    def check_training(self) -> None:
        """What a law over N and D needs: several depths, several budgets, losses at T = mu."""
        chosen = self.points.take(self.learns)
        if not len(chosen):
            some = " that laws may learn from (role 'fit')" if self.is_looped.any() else ""
            raise FitError(f"{self.model}: no looped runs{some}. Add runs with mean_loops above 1.")
        nominal = self.points.take(self.training())
        lacking = sorted(set(chosen.run.tolist()) - set(nominal.run.tolist()))
        if lacking:
            loops = sorted({float(chosen.mean_loops[chosen.run == run][0]) for run in lacking})
            raise FitError(
                f"{self.model}: {len(lacking)} runs, with mean_loops {_list(loops)}, have no loss "
                "measured at test_loops = mean_loops. Measure them there."
            )
        depths = np.unique(nominal.mean_loops)
        if len(depths) < 2:
            raise FitError(
                f"{self.model}: all runs have mean_loops {depths[0]:g}, so what looping does "
                "cannot be told. Train with at least three values."
            )
        budgets = np.unique(self.budget[self.training()])
        if len(budgets) < 2:
            raise FitError(
                f"{self.model}: all runs have one budget, {budgets[0]:.3g} FLOPs, where more loops "
                "always mean fewer tokens, so the two cannot be told apart. Add a second budget."
            )
        self.check_losses()

    def check_losses(self) -> None:
        """Equal losses fit any law whose terms vanish."""
        losses = self.points.loss[self.training()]
        if len(losses) > 1 and np.ptp(losses) <= SAME_LOSS * losses.mean():
            raise FitError(
                f"{self.model}: all {len(losses)} losses at test_loops = mean_loops are "
                f"{losses[0]:g}, so nothing can be learnt from them. Check how they were measured."
            )

    def mixed_settings(self) -> list[str]:
        """A grid of learning rates, say, is no isoFLOP grid: bad rates would bend the laws."""
        if not self.mixed:
            return []
        return [
            f"runs of the same loops and FLOPs differ in {', '.join(self.mixed)}, and laws learn "
            "from all of them alike. Leave the worse ones out, or mark them by a column 'role' "
            "as held-out."
        ]

    def check_test_time(self) -> None:
        chosen = self.points.take(self.is_looped)
        if not len(chosen):
            raise FitError(f"{self.model}: no looped runs. Add runs with mean_loops above 1.")
        most = max(int(mask.sum()) for _, mask in chosen.runs())
        if most == 1:
            raise FitError(
                f"{self.model}: every run has a loss at a single test_loops, so there is no curve. "
                "Measure runs at several, such as 1, 2, 4, 6, 8, 12, 16."
            )


def design_of(table: Table, model: str) -> Design:
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
        learns = looped & (table["role"][rows] == "fit")
    else:
        learns = looped & _in_a_grid(points.mean_loops, budget, looped)
        learns = learns if learns.any() else looped
    shape = shape_from(points.mean_loops, points.effective_params, flops / points.tokens)
    mixed = _mixed(table, rows[learns], points.take(learns), budget[learns])
    return Design(model, points, flops, budget, learns, shape, mixed)


def _mixed(table: Table, rows: np.ndarray, points: Points, budget: np.ndarray) -> tuple[str, ...]:
    """Columns that are one value within each run, but several among runs that should be alike."""
    found = []
    alike = list(zip(points.mean_loops.tolist(), budget.tolist(), strict=True))
    for name in (name for name in table.columns if name not in NO_SETTINGS):
        values = [str(value) for value in table[name][rows].tolist()]
        by_run = set(zip(points.run.tolist(), values, strict=True))
        by_cell = set(zip(alike, values, strict=True))
        if len(by_run) == len(set(points.run.tolist())) and len(by_cell) > len(set(alike)):
            found.append(name)
    return tuple(found)


def group_budgets(flops: np.ndarray) -> np.ndarray:
    """For each row the geometric mean of all that lie next to it without a gap."""
    order = np.argsort(flops, kind="stable")
    logs = np.log(flops[order])
    group = np.concatenate(([0], np.cumsum(np.diff(logs) > np.log(SAME_BUDGET))))
    means = np.bincount(group, logs) / np.bincount(group)
    budget = np.empty_like(flops, dtype=float)
    budget[order] = np.exp(means)[group]
    return np.array([float(f"{value:.4g}") for value in budget])


def _in_a_grid(loops: np.ndarray, budget: np.ndarray, looped: np.ndarray) -> np.ndarray:
    full = [
        one
        for one in np.unique(budget)
        if len(np.unique(loops[looped & (budget == one)])) >= DEPTHS_FOR_A_GRID
    ]
    return np.isin(budget, full)


def is_transformer(model: str) -> bool:
    return model.lower().startswith(TRANSFORMER)


def _list(numbers: list[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
