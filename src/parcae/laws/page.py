"""laws.html: an interactive page of the fitted laws in one file that loads nothing else.

All numbers are computed here by the laws of the library; `page.html` only draws them. As in
`parcae.predict`, optima and losses at T = mu are those of the training law, and losses at other T
those of the unified law. Answers are computed for every position of the FLOPs slider. The curves of
both charts are computed at a few budgets, between which the page interpolates (cubic, in log
FLOPs).
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from parcae.console import format_count, format_flops
from parcae.files import write_text
from parcae.laws.bootstrap import Estimate, LawResult, interval
from parcae.laws.fit import FitResult, ModelFit, to_plain
from parcae.laws.isoflop import Optimum, optimum
from parcae.laws.model_runs import MAX_SEARCHED_LOOPS, CostModel, Points
from parcae.plotting import page_style

POSITIONS = 97
"""Positions of the FLOPs slider, in addition to the budgets of the runs."""
NODES = 21
"""Budgets at which curves are computed."""
LOOP_POINTS = 64
TEST_LOOP_POINTS = 24
LOOPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
"""Positions of the slider of mean loops, in addition to those of the runs."""
MARKER, STYLE_MARKER = "/*DATA*/null", "/*STYLE*/\n"


def write_page(result: FitResult, path: str | Path) -> Path | None:
    """Write the page; returns None if no training law was fitted."""
    models = {
        name: page_data(model) for name, model in result.models.items() if "training" in model.laws
    }
    if not models:
        return None
    text = resources.files("parcae.laws").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(to_plain(models), allow_nan=False, separators=(",", ":"))
    text = text.replace(STYLE_MARKER, page_style(), 1)
    write_text(path, text.replace(MARKER, data.replace("<", "\\u003c"), 1))
    return Path(path)


def page_data(model: ModelFit) -> dict[str, Any]:
    """Everything the page shows of one model."""
    training, unified = model.laws["training"], model.laws.get("unified")
    budgets = np.unique(model.runs.budget[model.runs.fitted])
    positions = _slider_positions(budgets)
    best = [optimum(training, model.cost, flops) for flops in positions]
    depths = sorted({*LOOPS, *(int(d) for d in model.cost.measured if float(d).is_integer())})
    fitted_depths = np.unique(model.runs.points.mean_loops[model.runs.fitted])
    return {
        "formula": training.law.formula,
        "testFormula": None if unified is None else unified.law.formula,
        "flops": positions,
        "flopsText": [format_flops(flops) for flops in positions],
        "bestLoops": [here.loops.value for here in best],
        "answers": [_answer(flops, here) for flops, here in zip(positions, best, strict=True)],
        "start": [
            positions.index(float(budgets[len(budgets) // 2])),
            int(np.argmin(np.abs(np.array(depths) - fitted_depths[len(fitted_depths) // 2]))),
        ],
        **_curves(training, unified, model.cost, depths, positions),
        "runs": _runs(model),
    }


def _slider_positions(budgets: np.ndarray) -> list[float]:
    """Budgets from half the lowest to four times the highest, those of the runs among them."""
    between = np.geomspace(budgets.min() / 2, budgets.max() * 4, POSITIONS)
    step = np.log(between[1] / between[0])
    apart = np.abs(np.log(between[:, None] / budgets)).min(1) > step / 2
    return sorted([*map(float, between[apart]), *map(float, budgets)])


def _answer(flops: float, best: Optimum) -> str:
    return (
        f"For {format_flops(flops)} FLOPs: {_text(best.loops, 1)} loops, "
        f"{format_count(best.tokens.value)} tokens, loss {_text(best.loss, 4)}."
    )


def _text(estimate: Estimate, digits: int) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def _curves(
    training: LawResult,
    unified: LawResult | None,
    cost: CostModel,
    depths: list[int],
    positions: list[float],
) -> dict[str, Any]:
    """At every node, as line, low, high: loss at T = mu against mean loops by the training law, and
    loss against T for each depth by the unified law."""
    first = min((loops for loops in cost.measured if loops > 1), default=1.0)
    loops = np.unique([*np.geomspace(1, MAX_SEARCHED_LOOPS, LOOP_POINTS), first])
    tests = [_test_loops(depth) for depth in depths]
    nodes = np.geomspace(positions[0], positions[-1], NODES)
    by_loops, by_test = [], []
    for flops in nodes:
        at = cost.points_at(loops, flops / cost.smooth_flops_per_token(loops))
        by_loops.append(_series(training, at))
        if unified is None:
            continue
        curves = []
        for depth, test_loops in zip(depths, tests, strict=True):
            tokens = flops / cost.flops_per_token(depth) * np.ones(len(test_loops))
            curves.append(_series(unified, cost.points_at(depth, tokens, test_loops)))
        by_test.append(curves)
    return {
        "logFlops": [float(value) for value in np.log(nodes)],
        "loops": loops.tolist(),
        "byLoops": by_loops,
        "depths": depths,
        "testLoops": [test.tolist() for test in tests],
        "byTestLoops": by_test,
    }


def _test_loops(depth: int) -> np.ndarray:
    """Whole T up to twice the depth, closer together where the loss changes more."""
    grid = np.geomspace(1, max(24, 2 * depth), TEST_LOOP_POINTS)
    return np.unique([*np.round(grid), depth])


def _series(result: LawResult, at: Points) -> list[list[float]]:
    """Line, lower and upper end of the band; only the line without bootstrap samples."""

    def losses(values: Any) -> np.ndarray:
        return np.atleast_2d(result.law.predict(values, at))

    rows = [losses(result.values)[0]]
    if result.samples is not None:
        drawn = losses(result.samples.values)
        ends = np.array([interval(drawn[:, point]) for point in range(len(at))])
        rows += [ends[:, 0], ends[:, 1]]
    return [[float(f"{value:.5f}") for value in row] for row in rows]


def _runs(model: ModelFit) -> list[list[Any]]:
    """Each measured loss: mean loops, log budget, T, loss, whether T = mu, tooltip."""
    points, rows = model.runs.points, []
    for index in range(len(points)):
        mu, test = float(points.mean_loops[index]), float(points.test_loops[index])
        loss, tokens = float(points.loss[index]), float(points.tokens[index])
        text = f"μ {mu:g}, T {test:g}, {format_count(tokens)} tokens: loss {loss:.4f}"
        nominal = bool(model.runs.nominal_mask[index])
        rows.append([mu, float(np.log(model.runs.budget[index])), test, loss, nominal, text])
    return rows
