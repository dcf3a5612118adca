"""Runs whose recipes differ in the seed only: means, intervals and paired differences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parcae.evaluation.metrics import interval
from parcae.recipe import flatten
from parcae.report.runs import Run
from parcae.tables import text_cells
from parcae.training.run import FREE_TO_CHANGE

Row = Mapping[str, Any]
Members = Mapping[int, Sequence[Row]]
"""The rows of a group's runs by seed."""
DIGITS = {"mean": 3, "difference": 3, "p": 3}
NOTE = (
    "Over seeds: ± half the 95 % interval of the mean (Student's); differences from the first are "
    "paired by seed, with the p of a t-test."
)


def over_seeds(
    runs: Sequence[Run | None], rows: Sequence[Sequence[Row]], metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """One row for each group, number of loops and metric, if a group has several seeds.

    `rows` are those of each run in the table of runs. `mean_error` and `difference_error` are half
    the width of 95 % intervals; `difference` is the group minus the first, over `pairs` seeds.
    """
    groups: dict[str, dict[int, Sequence[Row]]] = {}
    for run, of_run in zip(runs, rows, strict=True):
        if run is not None:
            recipe = flatten(run.recipe)
            seed = recipe.pop("run.seed", None)
            for table, names in FREE_TO_CHANGE.items():
                for name in names:
                    recipe.pop(f"{table}.{name}", None)
            if isinstance(seed, int):
                key = json.dumps(recipe, sort_keys=True, default=str)
                groups.setdefault(key, {}).setdefault(seed, of_run)
    if not any(len(members) > 1 for members in groups.values()):
        return []
    table, first = [], next(iter(groups.values()))
    for members in groups.values():
        rows_of_first = next(iter(members.values()))
        name = str(rows_of_first[0]["run"])
        name += f" and {len(members) - 1} more" if len(members) > 1 else ""
        for loops in (row["loops"] for row in rows_of_first):
            for metric in metrics:
                values = _by_seed(members, loops, metric)
                if not values:
                    continue
                mean, half = interval(list(values.values()))
                line = {"runs": name, "loops": loops, "metric": metric}
                line |= {"seeds": len(values), "mean": mean, "mean_error": _finite(half)}
                base = {} if members is first else _by_seed(first, loops, metric)
                table.append(line | _difference(values, base))
    return table


def shown(
    rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """The headings and cells of these rows, with metrics named as in the table of runs."""
    titled = [
        {**row, "metric": titles.get(row["metric"], row["metric"].replace("_", " "))}
        for row in rows
    ]
    return text_cells(titled, titles=titles, digits=DIGITS)


def _by_seed(members: Members, loops: int | None, metric: str) -> dict[int, float]:
    """The values of a metric at these loops, or at the only ones; without runs that have none."""
    found = {
        seed: row.get(metric)
        for seed, rows in members.items()
        for row in rows
        if len(rows) == 1 or row["loops"] == loops
    }
    return {seed: value for seed, value in found.items() if value is not None}


def _difference(values: Mapping[int, float], base: Mapping[int, float]) -> dict[str, Any]:
    from scipy import stats

    differences = [values[seed] - base[seed] for seed in values if seed in base]
    if not differences:
        return dict.fromkeys(("pairs", "difference", "difference_error", "p"))
    mean, half = interval(differences)
    test: Any = stats.ttest_1samp(differences, 0) if 0 < half < math.inf else None
    return {
        "pairs": len(differences),
        "difference": mean,
        "difference_error": _finite(half),
        "p": None if test is None else float(test.pvalue),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
