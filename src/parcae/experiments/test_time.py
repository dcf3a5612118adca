"""Figures and tables of test-time scaling: loss against T, and the form of the curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from parcae import plotting
from parcae.experiments.experiment import (
    Experiment,
    Results,
    Row,
    Run,
    Table,
    format_losses,
    loss_at,
)
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.verdicts import Claim, describe, positive, together
from parcae.laws.forms import EXPONENTIAL, TEST_TIME
from parcae.laws.loop_curves import FormScore, compare_forms, fit_curves
from parcae.laws.model_runs import Points

MEANS = (2, 4, 6, 8, 10, 12)
TESTED = tuple(t for t in TEST_LOOPS if t <= 24)
GAIN_LEFT = 0.1
"""Share of the whole gain from looping that may be left at T = mu for the loss to be saturated."""


class TestTime(Experiment):
    __test__ = False  # for pytest
    name = "test-time"
    title = "Loss against the number of loops at test time"
    in_paper = "the figure of test-time scaling and the table of functional forms"
    paper = (
        "Average Huber loss (1e-7) of exponential, shifted power, power and pure power law: 2.52, "
        "5.42, 11.11, 112.89 fitted to all T (140M), 3.18, 21.41, 43.99, 397.90 extrapolated from "
        "T <= mu. Gains end near T = mu: L_inf differs from the loss there by 0.16 % on average."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, mean in itertools.product(scale.seeds, MEANS):
            tree = scale.text(model={"loop": {"mean_loops": mean}})
            yield Run(scale.recipe(tree, seed), {"mu": mean, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        scores = {seed: forms(results, seed) for seed in results.values("seed")}
        inside = [lead([score.inside for score in found]) for found in scores.values() if found]
        beyond = [
            lead([score.beyond for score in found if score.beyond is not None])
            for found in scores.values()
            if found and found[0].beyond is not None
        ]
        pooled = forms(results, None)
        left = {
            mean: [share_left(row) for row in results.where(mu=mean)]
            for mean in results.values("mu")
        }
        return [
            Claim(
                "The exponential form fits best",
                positive(inside),
                f"mean Huber loss (1e-7): {_errors(pooled, 'inside')}; "
                f"that of the best other form over its own is {_ratios(inside)}",
            ),
            Claim(
                "The exponential form extrapolates best from T <= mu",
                positive(beyond),
                f"mean Huber loss (1e-7): {_errors(pooled, 'beyond')}; "
                f"that of the best other form over its own is {_ratios(beyond)}",
            ),
            Claim(
                f"At T = mu at most {100 * GAIN_LEFT:g} % of the gain from looping is left",
                together(
                    positive(GAIN_LEFT - share for share in shares) for shares in left.values()
                ),
                "; ".join(f"mu = {mean}: {describe(shares, 2)}" for mean, shares in left.items()),
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = [
            (
                f"mu = {mean}",
                *(format_losses(results.loss(t, mu=mean)) for t in (1, 2, 4, 8, 16, 24)),
            )
            for mean in results.values("mu")
        ]
        return ("training", *(f"T = {t}" for t in (1, 2, 4, 8, 16, 24))), rows

    def draw(self, results: Results, path: Path) -> Path:
        means = results.values("mu")
        with plotting.figure(1, 2, width=4.8) as (canvas, (left, right)):
            for colour, mean in zip(plotting.shades(len(means)), means, strict=True):
                curves = [points(row) for row in results.where(mu=mean)]
                losses = np.mean([curve.loss for curve in curves], 0)
                left.plot(TESTED, losses, "o", color=colour, label=f"μ = {mean}")
                smooth = np.geomspace(1, max(TESTED), 100)
                mean_curve = points(results.where(mu=mean)[0], losses)
                left.plot(
                    smooth,
                    fit_curves(EXPONENTIAL, [mean_curve])[0].predict(smooth),
                    color=colour,
                    lw=1.2,
                )
            plotting.loop_ticks(left, TESTED)
            left.set(title="Loss, and fits of the exponential form")
            left.set(xlabel="loops T", ylabel="nats per token")
            left.legend(fontsize=8.5)
            found = forms(results, None)
            for index, (name, values) in enumerate(
                {"all T": [s.inside for s in found], "T > μ": [s.beyond for s in found]}.items()
            ):
                if all(value is not None for value in values):
                    places = np.arange(len(found)) + 0.35 * index
                    right.bar(places, values, 0.33, label=name, color=plotting.colour(index))
            right.set_xticks(range(len(found)), labels=[s.law.name for s in found])
            best = min(found, key=lambda score: score.inside).law.name if found else "no form"
            right.set(title=f"The {best} form fits best", ylabel="mean Huber loss", yscale="log")
            right.legend(fontsize=8.5)
            return plotting.save(canvas, path)


def points(row: Row, losses: np.ndarray | None = None) -> Points:
    """The curve of a run, or other losses at its numbers of loops."""
    ones = np.ones(len(TESTED))
    own = np.array([loss_at(row, t) for t in TESTED])
    return Points(
        effective_params=row["parameters"] * ones,
        tokens=row["tokens"] * ones,
        mean_loops=row["mu"] * ones,
        test_loops=np.array(TESTED, dtype=float),
        loss=own if losses is None else losses,
        run=0 * ones,
    )


def forms(results: Results, seed: int | None) -> list[FormScore]:
    """The scores of all forms over the curves of one seed, or of all."""
    rows = results.rows if seed is None else results.where(seed=seed)
    curves = [points(row) for row in rows]
    curves = [curve for curve in curves if np.isfinite(curve.loss).all()]
    return compare_forms(curves) if curves else []


def lead(errors: Sequence[float]) -> float:
    """log10 of the ratio of the best other form's error to the exponential form's."""
    assert TEST_TIME[0] is EXPONENTIAL
    return math.log10(min(errors[1:]) / errors[0]) if len(errors) > 1 and errors[0] > 0 else 0.0


def _errors(scores: Sequence[FormScore], part: Literal["inside", "beyond"]) -> str:
    """The errors of all forms over the curves of all seeds, in units of 1e-7."""
    errors = {score.law.name: getattr(score, part) for score in scores}
    return ", ".join(
        f"{name} {1e7 * error:.3g}" for name, error in errors.items() if error is not None
    )


def _ratios(exponents: Sequence[float]) -> str:
    """Powers of ten, one for each seed."""
    return ", ".join(f"{10**exponent:.2g}" for exponent in exponents) + " (by seed)"


def share_left(row: Row) -> float:
    """How much of the gain from T = 1 to the best T is still to come at T = mu."""
    losses = {t: loss_at(row, t) for t in TESTED}
    gain = losses[1] - min(losses.values())
    return (losses[row["mu"]] - min(losses.values())) / gain if gain > 0 else 0.0
