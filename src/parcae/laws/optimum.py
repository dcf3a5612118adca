"""The best use of a FLOP budget under the training law: loops against tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parcae.laws.forms import TRAINING
from parcae.laws.shape import Shape

Values = Mapping[str, "float | np.ndarray"]


def frontier(values: Values, shape: Shape, flops: float) -> tuple[np.ndarray, np.ndarray]:
    """The optimal mean_loops and the loss there, for each row of parameters."""
    loops = shape.loops_grid()
    at = shape.points(loops, flops / shape.flops_per_token(loops))
    losses = np.atleast_2d(TRAINING.predict(training_part(values), at))
    return _lowest(np.log(loops), losses, np.exp)


def flops_for(values: Values, shape: Shape, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest FLOPs that reach a loss, and the loops they are spent on; infinite where the law
    never gets there. At each depth the tokens that are needed follow in closed form."""
    loops = shape.loops_grid()
    rows = {name: np.atleast_1d(values[name])[:, None] for name in TRAINING.parameters}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        floor = rows["E"] + rows["X"] * shape.effective_params(loops) ** -rows["x"]
        left = loss - floor
        log_tokens = (np.log(rows["Y"]) - np.log(left)) / rows["y"]
        logs = log_tokens + np.log(shape.flops_per_token(loops))
    logs = np.where(left > 0, logs, np.inf)
    best_loops, best = _lowest(np.log(loops), logs, np.exp)
    with np.errstate(over="ignore"):
        return np.exp(best), best_loops


def training_part(values: Values) -> dict[str, float | np.ndarray]:
    """The training law within a unified one: they share their names."""
    return {name: values[name] for name in TRAINING.parameters}


def _lowest(places: np.ndarray, heights: np.ndarray, back) -> tuple[np.ndarray, np.ndarray]:
    """The lowest point of each row, between the grid's points by a parabola through three."""
    middle = np.clip(heights.argmin(1), 1, len(places) - 2)
    row = np.arange(len(heights))
    left, centre, right = (heights[row, middle + step] for step in (-1, 0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        bend = left - 2 * centre + right
        shift = np.where(bend > 0, 0.5 * (left - right) / bend, 0.0)
        shift = np.clip(np.nan_to_num(shift), -1.0, 1.0)
        lowest = centre - 0.25 * (left - right) * shift
    lowest = np.where(np.isfinite(lowest), lowest, heights.min(1))
    return back(places[middle] + shift * (places[1] - places[0])), lowest
