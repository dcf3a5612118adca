"""Figures of training scaling: parabolas at fixed FLOPs, power laws of the optimum, fixed depth.

Small shapes, so that a small budget has many tokens per parameter: looping needs them to pay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parcae import plotting
from parcae.console import format_flops
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import (
    NOT_SHOWN,
    Claim,
    Verdict,
    describe,
    interval,
    positive,
    together,
)
from parcae.laws.isoflop import Parabola, fit_parabolas, fit_power_law
from parcae.laws.table import FitError

SHAPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "micro": {
        "w32": {"width": 32, "heads": 1, "vocab_size": 512},
        "w16": {"width": 16, "heads": 1, "vocab_size": 512},
        "w32, two core layers": {"width": 32, "heads": 1, "vocab_size": 512, "core_layers": 2},
        "w48": {"width": 48, "heads": 2, "vocab_size": 512},
    },
    "toy": {"w32": {"width": 32, "heads": 1}},
    "paper": {"140m": {}, "370m": {}},
}
"""By scale and name: what differs from the scale's first size. The smallest was added when one seed
of the others showed no optimum: it sees more tokens per parameter at the same FLOPs."""
BUDGETS = {
    "micro": (1e11, 2.5e11, 6e11),
    "toy": (1e9, 2e9),
    "140m": (1e18, 2e18, 4e18, 8e18, 16e18, 64e18),
    "370m": (32e18, 64e18, 128e18),
}
"""Training FLOPs, by scale or, for the paper, by model."""
MEANS = {"micro": (1, 2, 3, 4, 8), "toy": (1, 2), "paper": (1, 2, 4, 6, 8, 10, 12)}


class IsoFlop(Experiment):
    name = "isoflop"
    title = "The best number of loops at fixed FLOPs"
    in_paper = "the figures of training scaling laws"
    paper = (
        "At 140M and 370M the loss at fixed FLOPs is a parabola in log(mu) with its minimum above "
        "mu = 1: mu* = 2, 2, 4, 6, 8, 10 at 1, 2, 4, 8, 16, 64e18 FLOPs. mu* grows as C^0.40, "
        "tokens as C^0.78; the frontier lies below that of fixed depth."
    )
    core_hours = 2.4

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, shape in itertools.product(scale.seeds, SHAPES[scale.name]):
            budgets = BUDGETS[shape if scale.name == "paper" else scale.name]
            for budget, mean in itertools.product(budgets, MEANS[scale.name]):
                labels = {"shape": shape, "budget": budget, "mu": mean, "seed": seed}
                yield Run(scale.recipe(shaped(scale, shape, mean, flops=budget), seed), labels)

    def claims(self, results: Results) -> list[Claim]:
        leads: list[Verdict] = []
        growth: list[Verdict] = []
        lead_texts, growth_texts = [], []
        for shape in results.values("shape"):
            top = max(results.values("budget", shape=shape))
            values = [
                lead(results, shape, top, seed) for seed in results.values("seed", shape=shape)
            ]
            values = [value for value in values if not math.isnan(value)]
            leads.append(positive(values))
            crossing = crossings(results, shape)
            lead_texts.append(
                f"{shape}: {describe(values)} nats at {format_flops(top)} FLOPs, {crossing}"
            )
            exponents = [
                exponent
                for seed in results.values("seed", shape=shape)
                if (exponent := power(results, shape, seed)) is not None
            ]
            growth.append(positive(exponents) if exponents else NOT_SHOWN)
            missing = "no optimum within the runs at two budgets"
            text = f"exponent {describe(exponents, 2)}" if exponents else missing
            growth_texts.append(f"{shape}: {text}")
        return [
            Claim(
                "At the largest budget the best looped run has a lower loss than fixed depth",
                together(leads),
                "; ".join(lead_texts),
            ),
            Claim(
                "The optimal number of loops grows with the budget",
                together(growth),
                "; ".join(growth_texts),
            ),
        ]

    def table(self, results: Results) -> Table:
        means = results.values("mu")
        rows = []
        for shape in results.values("shape"):
            for budget in results.values("budget", shape=shape):
                labels = {"shape": shape, "budget": budget}
                cells = [format_losses(results.loss(mean, mu=mean, **labels)) for mean in means]
                rows.append((shape, format_flops(budget), *cells))
        return ("shape", "FLOPs", *(f"mu = {mean}" for mean in means)), rows

    def draw(self, results: Results, path: Path) -> Path:
        shapes = results.values("shape")
        with plotting.figure(1, len(shapes), width=4.0, height=3.5) as (canvas, axes):
            for panel, shape in zip(np.atleast_1d(axes), shapes, strict=True):
                budgets = results.values("budget", shape=shape)
                fits = {fit.budget: fit for fit in parabolas(results, shape)}
                for colour, budget in zip(plotting.shades(len(budgets)), budgets, strict=True):
                    found = mean_losses(results, shape, budget)
                    label = format_flops(budget)
                    panel.plot(found.keys(), found.values(), "o", color=colour, label=label)
                    if budget in fits:
                        where = np.geomspace(fits[budget].low, fits[budget].high, 60)
                        panel.plot(where, fits[budget].loss(where), color=colour, lw=1.2)
                plotting.loop_ticks(panel, sorted(results.values("mu", shape=shape)))
                panel.set(title=shape, xlabel="mean loops μ", ylabel="loss at T = μ")
                panel.legend(title="FLOPs", fontsize=8)
            return plotting.save(canvas, path)


def shaped(scale: Scale, shape: str, mean: float, **budget: float) -> dict[str, Any]:
    """Tables of a run of one shape."""
    changes = {"model": {**SHAPES[scale.name][shape], "loop": {"mean_loops": mean}}}
    size = shape if scale.name == "paper" else None
    return scale.text("parcae", size, **changes, budget=budget)


def mean_losses(
    results: Results, shape: str, budget: float, seed: int | None = None
) -> dict[int, float]:
    """By mean loops: the loss at T = mu, averaged over seeds or of one seed; sorted."""
    found = {}
    for mean in sorted(results.values("mu", shape=shape, budget=budget)):
        losses = results.loss(mean, shape=shape, budget=budget, mu=mean)
        chosen = [loss for s, loss in losses.items() if seed in (None, s) and math.isfinite(loss)]
        if chosen:
            found[mean] = sum(chosen) / len(chosen)
    return found


def lead(results: Results, shape: str, budget: float, seed: int) -> float:
    """How much lower the best looped run is than fixed depth; NaN if either is missing."""
    losses = mean_losses(results, shape, budget, seed)
    looped = [loss for mean, loss in losses.items() if mean > 1]
    return losses[1] - min(looped) if looped and 1 in losses else math.nan


def parabolas(results: Results, shape: str, seed: int | None = None) -> list[Parabola]:
    """Parabolas through the looped runs of each budget; none where depths are too few."""
    points = [
        (mean, loss, budget)
        for budget in results.values("budget", shape=shape)
        for mean, loss in mean_losses(results, shape, budget, seed).items()
        if mean > 1
    ]
    try:
        return fit_parabolas(
            *(np.array(column, dtype=float) for column in zip(*points, strict=True))
        )
    except (FitError, TypeError):
        return []


def power(results: Results, shape: str, seed: int) -> float | None:
    """The exponent of the optimal number of loops against FLOPs; None if it is not determined."""
    try:
        return fit_power_law(parabolas(results, shape, seed)).exponent
    except FitError:
        return None


def crossings(results: Results, shape: str) -> str:
    """Where a line through the leads against log FLOPs crosses zero, over seeds, in words."""
    logs = []
    for seed in results.values("seed", shape=shape):
        leads = {b: lead(results, shape, b, seed) for b in results.values("budget", shape=shape)}
        known = {math.log10(b): value for b, value in leads.items() if not math.isnan(value)}
        if len(known) > 1:
            slope, constant = np.polyfit(list(known), list(known.values()), 1)
            if slope > 0:
                logs.append(-constant / slope)
    if not logs:
        return "no crossing in sight"
    mean, half = interval(logs)
    if math.isinf(half):
        return f"crossing near {10**mean:.1e} FLOPs"
    return f"crossing between {10 ** (mean - half):.1e} and {10 ** (mean + half):.1e} FLOPs"
