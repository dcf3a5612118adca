"""One law over mean loops, tokens and test loops, fitted to the isoFLOP runs of one shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parcae import plotting
from parcae.experiments.experiment import (
    Experiment,
    Results,
    Row,
    Run,
    Table,
    loss_at,
)
from parcae.experiments.isoflop import BUDGETS, MEANS, SHAPES, shaped
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import Claim, always, positive
from parcae.laws.fit import ModelFit, fit
from parcae.laws.loop_curves import Conditioning
from parcae.laws.table import FitError
from parcae.model.flops import effective_parameters

TESTED = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
HELD_OUT: Mapping[str, tuple[tuple[int, float], ...]] = {
    "micro": ((4, 2.4e6), (8, 2.4e6)),
    "toy": ((2, 192),),
    "paper": ((8, 11.2e9),),
}
"""(mean loops, tokens) of runs that no law is fitted to."""
STARTS = 30
ERROR, ORACLE_ERROR = 0.02, 0.005
"""The errors that count as shown: somewhat above the paper's."""


class Unified(Experiment):
    name = "unified"
    title = "One law for training and test time"
    in_paper = "the section on test-time scaling laws and its appendix"
    paper = (
        "Fitted to the isoFLOP runs, the unified law predicts held-out models within 0.85 to "
        "1.31 %, and within 0.10 to 0.17 % with the measured loss at T = mu. Without mu in the "
        "decay the error of the fit is 3.5 times as large; a learned exponent of mu (1.19, 1.17) "
        "gains 8 %."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        shape = next(iter(SHAPES[scale.name]))
        budgets = BUDGETS[shape if scale.name == "paper" else scale.name]
        means = [mean for mean in MEANS[scale.name] if mean > 1]
        for seed, budget, mean in itertools.product(scale.seeds, budgets, means):
            recipe = scale.recipe(shaped(scale, shape, mean, flops=budget), seed)
            yield Run(recipe, {"set": "grid", "budget": budget, "mu": mean, "seed": seed})
        for seed, (mean, tokens) in itertools.product(scale.seeds, HELD_OUT[scale.name]):
            recipe = scale.recipe(shaped(scale, shape, mean, tokens=tokens), seed)
            yield Run(recipe, {"set": "end-to-end", "budget": None, "mu": mean, "seed": seed})

    def measure(self, run: Run, store: Store) -> Row:
        effective = effective_parameters(run.recipe.model)
        return {**super().measure(run, store), "effective_params": effective}

    def claims(self, results: Results) -> list[Claim]:
        laws = {seed: fit_seed(results, seed) for seed in results.values("seed")}
        errors = [held for model in laws.values() if model for held in model.held_out]
        curve = [held.curve_error for held in errors if held.curve_error is not None]
        oracle = [held.oracle_error for held in errors if held.oracle_error is not None]
        without_law = [s for s, model in laws.items() if not model or "unified" not in model.laws]
        missing = sum(len(results.where(set="end-to-end", seed=seed)) for seed in without_law)
        note = f"; {missing} more runs, of seeds whose runs determine no law" if missing else ""
        complete = [m.conditionings for m in laws.values() if m and len(m.conditionings) == 3]
        ratios = [float(np.log(without.grid / with_mu.grid)) for _, with_mu, without in complete]
        return [
            Claim(
                f"The law predicts held-out runs within {100 * ERROR:g} %",
                always([*(error <= ERROR for error in curve), *[False] * missing]),
                f"mean error {_percent(curve)}{note}",
            ),
            Claim(
                f"With the loss at T = mu given, it predicts them within {100 * ORACLE_ERROR:g} %",
                always([*(error <= ORACLE_ERROR for error in oracle), *[False] * missing]),
                f"mean error {_percent(oracle)}{note}",
            ),
            Claim(
                "A decay with T / mu fits better than one with T",
                positive(ratios),
                _describe_conditionings(complete),
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for seed in results.values("seed"):
            model = fit_seed(results, seed)
            for held in model.held_out if model else ():
                errors = [
                    "" if error is None else f"{error:.2%}"
                    for error in (held.error, held.curve_error, held.oracle_error)
                ]
                rows.append((str(seed), f"{held.mean_loops:g}", f"{held.measured:.3f}", *errors))
        columns = ("seed", "mu", "loss at T = mu", "error there", "over all T", "with that loss")
        return columns, rows

    def draw(self, results: Results, path: Path) -> Path:
        rows = results.where(set="end-to-end")
        laws = {seed: fit_seed(results, seed) for seed in {row["seed"] for row in rows}}
        with plotting.figure(width=5.4) as (canvas, panel):
            for index, row in enumerate(rows):
                colour, label = plotting.colour(row["mu"]), f"μ = {row['mu']}"
                losses = [loss_at(row, t) for t in TESTED]
                first = row["mu"] not in [other["mu"] for other in rows[:index]]
                panel.plot(TESTED, losses, "o", color=colour, label=label if first else None)
                model = laws[row["seed"]]
                if model is not None and "unified" in model.laws:
                    law = model.laws["unified"]
                    for curve in model.runs.curves(model.runs.held_out(), 2):
                        if curve.mean_loops[0] == row["mu"]:
                            predicted = law.law.predict(law.values, curve)
                            panel.plot(curve.test_loops, predicted, color=colour, lw=1.2)
            plotting.loop_ticks(panel, TESTED)
            panel.set(title="Held-out runs and the law", xlabel="loops T", ylabel="nats per token")
            if rows:
                panel.legend()
            return plotting.save(canvas, path)


def fit_seed(results: Results, seed: int) -> ModelFit | None:
    """All laws of one seed's runs; None if they determine none."""
    try:
        found = fit(law_table(results.where(seed=seed)), starts=STARTS, bootstrap_samples=0)
    except FitError:
        return None
    return next(iter(found.models.values()))


def law_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row per run and number of test loops, as `parcae.fit` takes them."""
    return [
        {
            "model": "parcae",
            "run": row["key"],
            "set": row["set"],
            "mean_loops": row["mu"],
            "tokens": row["tokens"],
            "flops": row["flops"],
            "budget": row["budget"] or row["flops"],
            "effective_params": row["effective_params"],
            "seed": row["seed"],
            "test_loops": loops,
            "loss": loss_at(row, loops),
        }
        for row in rows
        for loops in sorted({*TESTED, row["mu"]})
        if np.isfinite(loss_at(row, loops))
    ]


def _describe_conditionings(fits: Sequence[Sequence[Conditioning]]) -> str:
    """Errors of the decay with a learned exponent of mu and without mu, over that with mu."""
    if not fits:
        return ""
    without = np.exp(np.mean([np.log(c.grid / b.grid) for _, b, c in fits]))
    learned = np.mean([1 - a.grid / b.grid for a, b, _ in fits])
    exponents = ", ".join(f"{a.gamma:.2f}" for a, _, _ in fits)
    return (
        f"without mu the error of the fit is {without:.1f} times as large; a learned exponent of "
        f"mu ({exponents}) lowers it by {learned:.0%}"
    )


def _percent(errors: Sequence[float]) -> str:
    return f"{np.mean(errors):.2%}" if errors else "–"
