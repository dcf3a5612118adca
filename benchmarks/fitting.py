"""Fitting a law from 500 random starts: batched L-BFGS against a loop of scipy's L-BFGS-B.

    python benchmarks/fitting.py [--repetitions 5] [--draws 100] [--out result.json]

All candidates minimise the same objective from the same starts in the same (standardised)
coordinates, with the same tolerances; scipy gets a function for one start at a time, with as few
numpy calls as possible. Candidates are interleaved. `--draws` then compares the best objective of
successive halving with the best of all starts followed to convergence, for that many draws of
starts, distributed over the data sets.

Data sets: points simulated from the paper's coefficients on its grids (36 and 18 runs; 360 losses
for the unified law), and the 240 published Chinchilla points if PARCAE_TEST_DATA is their folder.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from parcae.console import track
from parcae.experiments.paper_runs import paper_table
from parcae.laws.forms import CHINCHILLA, TRAINING, UNIFIED, Law
from parcae.laws.model_runs import Points, make_points, runs_of_model
from parcae.laws.optimise import DELTA, EVERY_START, Objective, descend, random_starts

STARTS = 500


def data_sets() -> dict[str, tuple[Law, Points]]:
    sets: dict[str, tuple[Law, Points]] = {}
    folder = os.environ.get("PARCAE_TEST_DATA")
    if folder:
        sets["Chinchilla, 240 points"] = (CHINCHILLA, chinchilla_points(Path(folder)))
    table = paper_table()
    for model in ("parcae-140m", "parcae-370m"):
        runs = runs_of_model(table, model)
        sets[f"{model}, training"] = (TRAINING, runs.points.take(runs.training()))
    runs = runs_of_model(table, "parcae-140m")
    sets["parcae-140m, unified"] = (UNIFIED, runs.points.take(runs.fitted))
    return sets


def chinchilla_points(folder: Path) -> Points:
    """The published points without the five highest losses."""
    path = folder / "data" / "scaling" / "chinchilla_epoch" / "svg_extracted_data.csv"
    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    size, flops, loss = (
        np.array([float(row[name]) for row in rows])
        for name in ("Model Size", "Training FLOP", "loss")
    )
    kept = loss < np.sort(loss)[-5]
    return make_points(
        loss=loss[kept], effective_params=size[kept], tokens=(flops / (6 * size))[kept]
    )


def plain_function(problem: Objective) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """The objective of one start, written out: a floor and terms exp(a - exp(r) u)."""
    features = [term.feature for term in problem.bound.terms]
    logs, scale = problem.log_losses, problem.scale

    def function(theta: np.ndarray) -> tuple[float, np.ndarray]:
        floor = np.exp(theta[0])
        rates = np.exp(theta[2::2])
        terms = [
            np.exp(theta[2 * k + 1] - rates[k] * feature) for k, feature in enumerate(features)
        ]
        losses = floor + sum(terms)
        residuals = np.log(losses) - logs
        clipped = np.clip(residuals, -DELTA, DELTA)
        weights = clipped / losses
        gradient = np.empty_like(theta)
        gradient[0] = floor * weights.sum()
        for k, (term, feature) in enumerate(zip(terms, features, strict=True)):
            weighted = weights * term
            gradient[2 * k + 1] = weighted.sum()
            gradient[2 * k + 2] = -rates[k] * (weighted @ feature)
        return scale * (clipped @ residuals - 0.5 * clipped @ clipped), scale * gradient

    return function


def scipy_loop(problem: Objective, starts: np.ndarray) -> float:
    function = plain_function(problem)
    options = {
        "maxiter": EVERY_START.rounds,
        "maxfun": 10 * EVERY_START.rounds,
        "ftol": EVERY_START.decrease,
        "gtol": EVERY_START.slope,
    }
    with np.errstate(all="ignore"):
        return min(
            minimize(function, start, jac=True, method="L-BFGS-B", options=options).fun
            for start in starts.T
        )


def batched(problem: Objective, starts: np.ndarray, halving: bool) -> float:
    _, best = descend(problem, starts, halving=halving)
    return float(best.values[0])


CANDIDATES: dict[str, Callable[[Objective, np.ndarray], float]] = {
    "scipy": scipy_loop,
    "batched, all to convergence": lambda problem, starts: batched(problem, starts, halving=False),
    "batched, halving": lambda problem, starts: batched(problem, starts, halving=True),
}


def measure(law: Law, data: Points, repetitions: int) -> dict[str, dict[str, float]]:
    problem = Objective(law, data)
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    best: dict[str, float] = {}
    for repetition in range(repetitions):
        starts = random_starts(problem, STARTS, np.random.default_rng(repetition))
        for name, candidate in CANDIDATES.items():
            begin = time.perf_counter()
            value = candidate(problem, starts)
            seconds[name].append(time.perf_counter() - begin)
            best[name] = min(best.get(name, np.inf), value)
    return {
        name: {
            "minimum": min(taken),
            "median": statistics.median(taken),
            "objective": problem.total(best[name]),
        }
        for name, taken in seconds.items()
    }


def compare_draws(sets: dict[str, tuple[Law, Points]], draws: int) -> tuple[int, float]:
    """How often halving was worse than following all starts, and the largest relative excess."""
    worse, most = 0, -np.inf
    listed = list(sets.values())
    for draw in track(range(draws), "draws of starts", draws):
        law, data = listed[draw % len(listed)]
        problem = Objective(law, data)
        starts = random_starts(problem, STARTS, np.random.default_rng(1000 + draw))
        excess = batched(problem, starts, True) / batched(problem, starts, False) - 1
        worse += excess > 1e-9
        most = max(most, excess)
    return worse, float(most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--repetitions", type=int, default=5, help="of the timing (%(default)s)")
    parser.add_argument(
        "--draws", type=int, default=0, help="of starts, to compare halving (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results (none)")
    arguments = parser.parse_args()
    sets = data_sets()
    result: dict[str, object] = {}
    print(f"{STARTS} starts; times as ratios: scipy / candidate")
    for title, (law, data) in sets.items() if arguments.repetitions else ():
        times = measure(law, data, arguments.repetitions)
        result[title] = times
        print(f"\n{title}: scipy takes {times['scipy']['minimum']:.2f} s at best")
        print(f"{'':30}{'by minima':>11}{'by medians':>12}{'objective':>16}")
        for name, row in times.items():
            ratios = [times["scipy"][key] / row[key] for key in ("minimum", "median")]
            print(f"{name:30}{ratios[0]:10.1f}x{ratios[1]:11.1f}x{row['objective']:16.9g}")
    if arguments.draws:
        worse, most = compare_draws(sets, arguments.draws)
        result["halving"] = {"draws": arguments.draws, "worse": worse, "largest_excess": most}
        print(f"\nhalving against all starts, {arguments.draws} draws over {len(sets)} data sets:")
        print(f"worse (beyond 1e-9) in {worse}; largest relative excess {most:.1g}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
