"""Coverage of the 90 % intervals, on simulated runs whose true law is known.

    python benchmarks/coverage_of_intervals.py [--draws 200] [--samples 200] [--noise 1]

Each draw simulates the paper's grid from its coefficients with new noise, fits the law, and checks
whether the true losses (at runs of the grid, the held-out models, and beyond) and the true optimal
loops (at budgets whose optimum is above two loops) lie in their intervals.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from parcae.experiments import paper_runs as paper
from parcae.experiments.paper_runs import paper_table
from parcae.laws.bootstrap import bootstrap, interval
from parcae.laws.forms import TRAINING, UNIFIED, Law
from parcae.laws.isoflop import frontier, training_part
from parcae.laws.model_runs import ModelRuns, runs_of_model
from parcae.laws.optimise import fit_law

LOSSES_AT = {
    "parcae-140m": ((2, 1e9), (8, 4e9), (12, 6e9), (4, 1e10), (8, 11.2e9), (8, 29.6e9), (16, 6e10)),
    "parcae-370m": (
        (2, 3e10),
        (8, 1e10),
        (12, 3e10),
        (4, 5e10),
        (8, 29.6e9),
        (8, 6e10),
        (16, 6e10),
    ),
}
BUDGETS = {"parcae-140m": (4e18, 8e18, 16e18), "parcae-370m": (32e18, 64e18, 128e18)}
"""Budgets whose optimum is above the shallowest looped runs."""


@dataclass(frozen=True)
class Coverage:
    losses: np.ndarray
    """Share of draws whose interval contains the true loss, by run of `LOSSES_AT`."""
    loops: np.ndarray
    """The same for the optimal loops, by budget."""
    error: float
    """Root mean square of log(predicted / true) at the held-out model."""
    exponents: np.ndarray
    """The same for x and y, which are nearly collinear with X, Y and E."""


def measure(model: str, law: Law, draws: int, samples: int, noise: float = 1.0) -> Coverage:
    truth = dict(paper.COEFFICIENTS[model])
    if law is TRAINING:  # fitted to losses at T = mu, where the decay has not quite ended
        truth["E"] += paper.TEST_TIME["Z"] * np.exp(-paper.TEST_TIME["z"])
    losses, loops, exponents, errors = [], [], [], []
    for draw in range(draws):
        size = model.partition("-")[2]
        runs = runs_of_model(paper_table((size,), seed=10_000 + draw, noise=noise), model)
        rows = runs.training() if law is TRAINING else runs.fitted
        law_fit = fit_law(law, runs.points.take(rows))
        values = bootstrap(law_fit, samples, seed=draw).values
        losses.append(_losses_covered(runs, truth, values))
        loops.append([_loops_covered(runs, truth, values, flops) for flops in BUDGETS[model]])
        exponents.append([_inside(values[name], truth[name]) for name in ("x", "y")])
        at = runs.cost.points_at(paper.HELD_OUT_LOOPS, paper.TOKENS[size])
        predicted = TRAINING.predict(training_part(law_fit.values), at)
        errors.append(np.log(predicted / TRAINING.predict(truth, at))[0])
    error = float(np.sqrt(np.mean(np.square(errors))))
    return Coverage(np.mean(losses, 0), np.mean(loops, 0), error, np.mean(exponents, 0))


def _losses_covered(
    runs: ModelRuns, truth: dict[str, float], values: dict[str, np.ndarray]
) -> list[bool]:
    at = runs.cost.points_at(*zip(*LOSSES_AT[runs.model], strict=True))
    true = TRAINING.predict(truth, at)
    drawn = TRAINING.predict(training_part(values), at)
    return [_inside(drawn[:, index], true[index]) for index in range(len(true))]


def _loops_covered(
    runs: ModelRuns, truth: dict[str, float], values: dict[str, np.ndarray], flops: float
) -> bool:
    true = float(frontier(truth, runs.cost, flops)[0][0])
    return _inside(frontier(values, runs.cost, flops)[0], true)


def _inside(drawn: np.ndarray, true: float) -> bool:
    low, high = interval(drawn)
    return low <= true <= high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--draws", type=int, default=200, help="simulated grids (%(default)s)")
    parser.add_argument(
        "--samples", type=int, default=200, help="bootstrap samples per fit (%(default)s)"
    )
    parser.add_argument("--noise", type=float, default=1.0, help="scale of the noise (%(default)s)")
    arguments = parser.parse_args()
    draws, samples = arguments.draws, arguments.samples
    print(f"{draws} draws, {samples} bootstrap samples each, noise x {arguments.noise:g}")
    for model in BUDGETS:
        for law in (TRAINING, UNIFIED):
            result = measure(model, law, draws, samples, arguments.noise)
            print(f"\n{model}, {law.name}")
            print(f"  losses   {result.losses.mean():.3f}  {np.round(result.losses, 3)}")
            print(f"  loops    {result.loops.mean():.3f}  {np.round(result.loops, 3)}")
            print(f"  x and y  {result.exponents.mean():.3f}  {np.round(result.exponents, 3)}")
            print(f"  held-out error, root mean square {result.error:.2e}", flush=True)


if __name__ == "__main__":
    main()
