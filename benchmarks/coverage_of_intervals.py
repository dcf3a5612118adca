"""Do 90 % intervals hold the truth 90 % of the time? Fits of made-up runs, whose truth is known.

    python benchmarks/coverage_of_intervals.py [--draws 200] [--samples 200] [--noise 1]

Each draw makes the paper's grid anew from its coefficients with fresh noise, fits the law, and asks
whether the true losses (at runs of the grid, the held-out models, and beyond) and the true optimal
loops (at budgets whose optimum is deeper than two loops) lie in their intervals.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from parcae.experiments import paper_runs as paper
from parcae.experiments.paper_runs import paper_table
from parcae.laws.bootstrap import bootstrap, interval
from parcae.laws.fit import fit_law
from parcae.laws.forms import TRAINING, UNIFIED, Law
from parcae.laws.isoflop import frontier, training_part
from parcae.laws.model_runs import ModelRuns, runs_of_model

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
"""Those whose optimum lies between the steps that loops come in at the shallow end."""


@dataclass(frozen=True)
class Coverage:
    losses: np.ndarray
    """Share of draws whose interval holds the true loss, by place."""
    loops: np.ndarray
    """The same of the optimal loops, by budget."""
    error: float
    """Root mean square of log(predicted / true) at the held-out model."""
    exponents: np.ndarray
    """For the record: the same of x and y, which are nearly collinear with X, Y and E."""


def measure(model: str, law: Law, draws: int, samples: int, noise: float = 1.0) -> Coverage:
    truth = dict(paper.COEFFICIENTS[model])
    if law is TRAINING:  # it learns losses at T = mu, where the decay has not quite ended
        truth["E"] += paper.TEST_TIME["Z"] * np.exp(-paper.TEST_TIME["z"])
    losses, loops, exponents, errors = [], [], [], []
    for draw in range(draws):
        size = model.partition("-")[2]
        runs = runs_of_model(paper_table((size,), seed=10_000 + draw, noise=noise), model)
        rows = runs.training() if law is TRAINING else runs.fitted
        found = fit_law(law, runs.points.take(rows))
        values = bootstrap(found, samples, seed=draw).values
        losses.append(_losses_covered(runs, truth, values))
        loops.append([_loops_covered(runs, truth, values, one) for one in BUDGETS[model]])
        exponents.append([_inside(values[name], truth[name]) for name in ("x", "y")])
        at = runs.shape.points(paper.HELD_OUT_LOOPS, paper.TOKENS[size])
        predicted = TRAINING.predict(training_part(found.values), at)
        errors.append(np.log(predicted / TRAINING.predict(truth, at))[0])
    error = float(np.sqrt(np.mean(np.square(errors))))
    return Coverage(np.mean(losses, 0), np.mean(loops, 0), error, np.mean(exponents, 0))


def _losses_covered(
    runs: ModelRuns, truth: dict[str, float], values: dict[str, np.ndarray]
) -> list[bool]:
    at = runs.shape.points(*zip(*LOSSES_AT[runs.model], strict=True))
    true = TRAINING.predict(truth, at)
    drawn = TRAINING.predict(training_part(values), at)
    return [_inside(drawn[:, place], true[place]) for place in range(len(true))]


def _loops_covered(
    runs: ModelRuns, truth: dict[str, float], values: dict[str, np.ndarray], flops: float
) -> bool:
    true = float(frontier(truth, runs.shape, flops)[0][0])
    return _inside(frontier(values, runs.shape, flops)[0], true)


def _inside(drawn: np.ndarray, true: float) -> bool:
    low, high = interval(drawn)
    return low <= true <= high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--noise", type=float, default=1.0)
    arguments = parser.parse_args()
    print(f"{arguments.draws} draws, {arguments.samples} samples each, noise x {arguments.noise:g}")
    for model in BUDGETS:
        for law in (TRAINING, UNIFIED):
            found = measure(model, law, arguments.draws, arguments.samples, arguments.noise)
            print(f"\n{model}, {law.name}")
            print(f"  losses   {found.losses.mean():.3f}  {np.round(found.losses, 3)}")
            print(f"  loops    {found.loops.mean():.3f}  {np.round(found.loops, 3)}")
            print(f"  x and y  {found.exponents.mean():.3f}  {np.round(found.exponents, 3)}")
            print(f"  held-out error, root mean square {found.error:.2e}", flush=True)


if __name__ == "__main__":
    main()
