"""laws.html: an interactive page of the fitted laws in one file that loads nothing else.

All numbers are computed here by the laws of the library; `page.html` only draws them. Answers are
computed for every position of the FLOPs slider. The curves of both charts are computed at a few
budgets, between which the page interpolates (cubic, in log FLOPs).
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from parcae.console import format_count, format_flops
from parcae.files import write_text
from parcae.laws.analysis import FitResult, ModelFit, to_plain
from parcae.laws.bootstrap import Estimate, LawResult, interval
from parcae.laws.forms import TRAINING, Law
from parcae.laws.isoflop import frontier, training_part
from parcae.laws.model_runs import MAX_LOOPS, Points, Shape

POSITIONS = 97
"""Positions of the FLOPs slider, in addition to the budgets of the runs."""
NODES = 21
"""Budgets at which curves are computed."""
LOOP_POINTS = 64
TEST_LOOP_POINTS = 24
LOOPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
"""Positions of the slider of mean loops, in addition to those of the runs."""
MARKER = "/*DATA*/null"


def write_page(result: FitResult, path: str | Path) -> Path | None:
    """Write the page; returns None if no training law was fitted."""
    models = {
        name: page_data(model) for name, model in result.models.items() if "training" in model.laws
    }
    if not models:
        return None
    text = resources.files("parcae.laws").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(to_plain(models), allow_nan=False, separators=(",", ":"))
    write_text(path, text.replace(MARKER, data.replace("<", "\\u003c"), 1))
    return Path(path)


def page_data(model: ModelFit) -> dict[str, Any]:
    """Everything the page shows of one model."""
    result = model.laws.get("unified", model.laws["training"])
    budgets = np.unique(model.runs.budget[model.runs.fitted])
    positions = _slider_positions(budgets)
    best = [_optimum(result, model.shape, flops) for flops in positions]
    depths = sorted({*LOOPS, *(int(d) for d in model.shape.measured if float(d).is_integer())})
    fitted_depths = np.unique(model.runs.points.mean_loops[model.runs.fitted])
    return {
        "formula": result.law.formula,
        "flops": positions,
        "flopsText": [format_flops(flops) for flops in positions],
        "bestLoops": [loops.value for loops, _ in best],
        "answers": [
            _answer(model.shape, flops, *pair) for flops, pair in zip(positions, best, strict=True)
        ],
        "start": [
            positions.index(float(budgets[len(budgets) // 2])),
            int(np.argmin(np.abs(np.array(depths) - fitted_depths[len(fitted_depths) // 2]))),
        ],
        **_curves(result, model.shape, depths, positions),
        "runs": _runs(model),
    }


def _slider_positions(budgets: np.ndarray) -> list[float]:
    """Budgets from half the lowest to four times the highest, those of the runs among them."""
    between = np.geomspace(budgets.min() / 2, budgets.max() * 4, POSITIONS)
    step = np.log(between[1] / between[0])
    apart = np.abs(np.log(between[:, None] / budgets)).min(1) > step / 2
    return sorted([*map(float, between[apart]), *map(float, budgets)])


def _optimum(result: LawResult, shape: Shape, flops: float) -> tuple[Estimate, Estimate]:
    """The optimal mean loops and the loss there."""
    loops, loss = frontier(result.values, shape, flops)
    if result.samples is None:
        return Estimate(float(loops[0])), Estimate(float(loss[0]))
    all_loops, all_losses = frontier(result.samples.values, shape, flops)
    return (
        Estimate(float(loops[0]), *interval(all_loops)),
        Estimate(float(loss[0]), *interval(all_losses)),
    )


def _answer(shape: Shape, flops: float, loops: Estimate, loss: Estimate) -> str:
    tokens = flops / float(shape.flops_per_token(loops.value))
    return (
        f"For {format_flops(flops)} FLOPs: {_text(loops, 1)} loops, {format_count(tokens)} tokens, "
        f"loss {_text(loss, 4)}."
    )


def _text(estimate: Estimate, digits: int) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def _curves(
    result: LawResult, shape: Shape, depths: list[int], positions: list[float]
) -> dict[str, Any]:
    """Loss against mean loops, and against T for each depth, at every node: line, low, high."""
    first = min((loops for loops in shape.measured if loops > 1), default=1.0)
    loops = np.unique([*np.geomspace(1, MAX_LOOPS, LOOP_POINTS), first])
    tests = [_test_loops(depth) for depth in depths]
    nodes = np.geomspace(positions[0], positions[-1], NODES)
    by_loops, by_test = [], []
    for flops in nodes:
        at = shape.points(loops, flops / shape.flops_per_token(loops))
        by_loops.append(_series(result, TRAINING, at))
        curves = []
        for depth, test_loops in zip(depths, tests, strict=True):
            tokens = flops / shape.flops_per_token(depth) * np.ones(len(test_loops))
            curves.append(_series(result, result.law, shape.points(depth, tokens, test_loops)))
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


def _series(result: LawResult, law: Law, at: Points) -> list[list[float]]:
    """Line, lower and upper end of the band; only the line without bootstrap samples."""

    def losses(values: Any) -> np.ndarray:
        chosen = training_part(values) if law is TRAINING else values
        return np.atleast_2d(law.predict(chosen, at))

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
        nominal = bool(model.runs.is_nominal[index])
        rows.append([mu, float(np.log(model.runs.budget[index])), test, loss, nominal, text])
    return rows
