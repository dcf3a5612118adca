"""Figures of training scaling: parabolas at fixed FLOPs, power laws of the optimum, fixed depth.

Small shapes, so that a small budget has many tokens per parameter: looping needs them to pay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
EXTRAPOLATED_DECADES = 4
"""How far beyond the largest budget the figure follows the leads."""


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
        columns = (len(shapes) + 3) // 2
        with plotting.figure(2, columns, width=4.0, height=3.3) as (canvas, axes):
            *panels, frontier, leads = axes.flat[: len(shapes) + 2]
            for unused in axes.flat[len(shapes) + 2 :]:
                unused.remove()
            for panel, shape in zip(panels, shapes, strict=True):
                _draw_shape(panel, results, shape)
            _draw_frontier(frontier, results)
            _draw_leads(leads, results)
            return plotting.save(canvas, path)


def _draw_shape(panel: Any, results: Results, shape: str) -> None:
    budgets = results.values("budget", shape=shape)
    fits = {fit.budget: fit for fit in parabolas(results, shape)}
    for colour, budget in zip(plotting.shades(len(budgets)), budgets, strict=True):
        found = mean_losses(results, shape, budget)
        panel.plot(found.keys(), found.values(), "o", color=colour)
        if found:
            at = max(found)
            panel.text(1.12 * at, found[at], format_flops(budget), color=colour, va="center")
        if budget in fits:
            where = np.geomspace(fits[budget].low, fits[budget].high, 60)
            panel.plot(where, fits[budget].loss(where), color=colour, lw=1.2)
    plotting.loop_ticks(panel, sorted(results.values("mu", shape=shape)))
    panel.set(title=shape, xlabel="mean loops μ", ylabel="loss at T = μ")
    panel.margins(x=0.16)


def _draw_frontier(panel: Any, results: Results) -> None:
    for index, shape in enumerate(results.values("shape")):
        colour = plotting.colour(index)
        by_budget = {
            b: mean_losses(results, shape, b) for b in results.values("budget", shape=shape)
        }
        fixed = {b: losses[1] for b, losses in by_budget.items() if 1 in losses}
        looped = {
            b: min(loss for mean, loss in losses.items() if mean > 1)
            for b, losses in by_budget.items()
            if any(mean > 1 for mean in losses)
        }
        panel.plot(looped.keys(), looped.values(), "o-", color=colour, label=shape)
        panel.plot(fixed.keys(), fixed.values(), "s--", color=colour, mfc="white", lw=1.2)
    panel.set(title="Best looped (line), fixed depth (dashed)", xlabel="FLOPs", ylabel="loss")
    panel.set_xscale("log")
    plotting.flop_ticks(panel.xaxis, results.values("budget"))
    panel.legend(fontsize=8)


def _draw_leads(panel: Any, results: Results) -> None:
    """The leads of all seeds, and lines through them on to the budget where they cross zero."""
    budgets = results.values("budget")
    first, top = math.log10(min(budgets)), math.log10(max(budgets))
    last = top + EXTRAPOLATED_DECADES
    for index, shape in enumerate(results.values("shape")):
        colour, label = plotting.colour(index), shape
        for seed in results.values("seed", shape=shape):
            leads = seed_leads(results, shape, seed)
            panel.plot(leads.keys(), leads.values(), "o", color=colour, ms=4, label=label)
            label = None
            if line := lead_line(leads):
                until = top if line.crossing is None else min(line.crossing, last)
                where = np.array([first, until])
                panel.plot(10**where, line.slope * where + line.constant, color=colour, lw=0.8)
    panel.axhline(0, color=plotting.DARK_GREY, lw=1)
    panel.set(title="Lead over fixed depth, extrapolated", xlabel="FLOPs", ylabel="nats")
    panel.set_xscale("log")
    panel.legend(fontsize=8)


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


class Line(NamedTuple):
    """A lead against the decimal logarithm of the FLOPs."""

    slope: float
    constant: float

    @property
    def crossing(self) -> float | None:
        """The logarithm at which the lead becomes positive; None if it does not grow."""
        return -self.constant / self.slope if self.slope > 0 else None


def seed_leads(results: Results, shape: str, seed: int) -> dict[float, float]:
    """The leads of one seed by budget, where they are known."""
    leads = {b: lead(results, shape, b, seed) for b in results.values("budget", shape=shape)}
    return {budget: value for budget, value in leads.items() if not math.isnan(value)}


def lead_line(leads: Mapping[float, float]) -> Line | None:
    """The line through leads by budget; None through fewer than two."""
    if len(leads) < 2:
        return None
    slope, constant = np.polyfit(np.log10(list(leads)), list(leads.values()), 1)
    return Line(float(slope), float(constant))


def crossings(results: Results, shape: str) -> str:
    """Where the lines of the seeds cross zero, in words."""
    lines = [
        line
        for seed in results.values("seed", shape=shape)
        if (line := lead_line(seed_leads(results, shape, seed)))
    ]
    logs = [crossing for line in lines if (crossing := line.crossing) is not None]
    if not logs:
        return "no crossing in sight"
    some = "" if len(logs) == len(lines) else f", in {len(logs)} of {len(lines)} seeds"
    mean, half = interval(logs)
    if math.isinf(half):
        return f"crossing near {10**mean:.1e} FLOPs{some}"
    low, high = (10.0 ** (mean + side * half) for side in (-1, 1))
    return f"crossing near {10**mean:.1e} FLOPs ({low:.1e} to {high:.1e}{some})"
