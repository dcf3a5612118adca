"""laws.html: the fitted laws to play with, in one file that fetches nothing.

The page holds the parameters of the laws, some of their bootstrap replicas and the runs, and
computes losses, optima and intervals in the browser (`page.html` is its text).
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from parcae.files import write_text
from parcae.laws.analysis import FitResult, ModelFit, to_plain

REPLICAS = 80
"""So many replicas draw a band as well as all do, and keep the page small."""
PLACE = "/*DATA*/null"


def write_page(result: FitResult, path: str | Path) -> Path | None:
    """None, and no page, where no training law was fitted."""
    models = {n: _model(m) for n, m in result.models.items() if "training" in m.laws}
    if not models:
        return None
    text = resources.files("parcae.laws").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(to_plain(models), allow_nan=False, separators=(",", ":"))
    write_text(path, text.replace(PLACE, data.replace("<", "\\u003c"), 1))
    return Path(path)


def _model(model: ModelFit) -> dict[str, Any]:
    runs, shape = model.runs, model.shape
    points = runs.points
    chosen = model.laws.get("unified", model.laws["training"])
    draws = [] if chosen.samples is None else _draws(chosen.samples.values, chosen.law.parameters)
    depths = sorted(loops for loops in shape.measured if loops > 1)
    return {
        "formula": chosen.law.formula,
        "names": list(chosen.law.parameters),
        "values": [chosen.values[name] for name in chosen.law.parameters],
        "draws": draws,
        "shape": {
            "params": shape.params,
            "paramsPerLoop": shape.params_per_loop,
            "flops": shape.flops,
            "flopsPerLoop": shape.flops_per_loop,
            "first": depths[0] if depths else 1,
            "once": shape.measured.get(1.0, (0.0, None))[1],
        },
        "runs": [
            [float(value) for value in row]
            for row in zip(
                points.mean_loops,
                points.tokens,
                runs.budget,
                points.test_loops,
                points.loss,
                runs.fitted,
                strict=True,
            )
        ],
    }


def _draws(values: dict[str, np.ndarray], names: tuple[str, ...]) -> list[list[float]]:
    columns = np.stack([values[name][:REPLICAS] for name in names])
    return [[float(f"{value:.7g}") for value in row] for row in columns.T]
