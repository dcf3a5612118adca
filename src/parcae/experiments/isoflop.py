"""Figures of training scaling: parabolas at fixed FLOPs, power laws of the optimum, fixed depth.

Small shapes, so that a small budget has many tokens per parameter: looping needs them to pay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from parcae import plotting
from parcae.console import format_flops
from parcae.evaluation.metrics import CONFIDENCE
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import (
    NOT_SHOWN,
    Claim,
    Verdict,
    describe,
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
LARGER: Mapping[str, Mapping[str, Mapping[float, Sequence[int]]]] = {
    "micro": {"w32": {2.4e12: (1, 2, 3, 4, 8), 9.6e12: (1, 2, 4)}},
    "toy": {"w32": {4e9: (1, 2)}},
}
"""By scale, shape and budget: mean loops of runs beyond the common budgets. They were added, with
their two claims, when the leads up to 6e11 FLOPs had been extrapolated to zero near 1e13."""
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

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, shape in itertools.product(scale.seeds, SHAPES[scale.name]):
            budgets = BUDGETS[shape if scale.name == "paper" else scale.name]
            larger = LARGER.get(scale.name, {}).get(shape, {})
            grid = [*itertools.product(budgets, MEANS[scale.name])]
            grid += [(flops, mean) for flops, means in larger.items() for mean in means]
            for budget, mean in grid:
                labels = {"shape": shape, "budget": budget, "mu": mean, "seed": seed}
                yield Run(scale.recipe(shaped(scale, shape, mean, flops=budget), seed), labels)

    def claims(self, results: Results) -> list[Claim]:
        leads: list[Verdict] = []
        growth: list[Verdict] = []
        lead_texts, growth_texts = [], []
        tops = {s: max(results.values("budget", shape=s)) for s in results.values("shape")}
        common, top = min(tops.values(), default=0.0), max(tops.values(), default=0.0)
        for shape in tops:
            values = leads_of(results, shape, common)
            leads.append(positive(values))
            text = f"{shape}: {describe(values)} nats"
            if values and max(values) < 0:
                crossing = find_crossing(leads_by_budget(results, shape))
                text += f", {describe_crossing(crossing)}"
            lead_texts.append(text)
            exponents = [
                exponent
                for seed in results.values("seed", shape=shape)
                if (exponent := power(results, shape, seed)) is not None
            ]
            growth.append(positive(exponents) if exponents else NOT_SHOWN)
            missing = "fewer than two budgets have a minimum between the tested mu"
            text = f"exponent {describe(exponents, 2)}" if exponents else missing
            growth_texts.append(f"{shape}: {text}")
        claims = [
            Claim(
                "At the largest budget of all shapes the best looped run has a lower loss than "
                "fixed depth",
                together(leads),
                f"lead at {format_flops(common)} FLOPs: {'; '.join(lead_texts)}",
            ),
            Claim(
                "The optimal number of loops grows with the budget",
                together(growth),
                "; ".join(growth_texts),
            ),
        ]
        if top > common:
            claims += _claims_at(results, [s for s in tops if tops[s] == top], top)
        return claims

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


def _claims_at(results: Results, shapes: Sequence[str], top: float) -> list[Claim]:
    """What is claimed of the shapes that were trained with the most FLOPs."""
    leads = {shape: leads_of(results, shape, top) for shape in shapes}
    best: dict[str, list[tuple[int, int]]] = {}
    for shape in shapes:
        first = best_means(results, shape, min(results.values("budget", shape=shape)))
        last = best_means(results, shape, top)
        best[shape] = [(first[seed], last[seed]) for seed in first if seed in last]
    at = format_flops(top)
    return [
        Claim(
            f"With enough FLOPs, {at}, the best looped run has a lower loss than fixed depth",
            together(positive(values) for values in leads.values()),
            "; ".join(f"{shape}: {describe(values)} nats" for shape, values in leads.items()),
        ),
        Claim(
            f"From the smallest budget to {at} FLOPs the best number of loops grows",
            together(positive(b - a for a, b in pairs) for pairs in best.values()),
            "; ".join(
                f"{shape}: " + ", ".join(f"{a} to {b}" for a, b in pairs) + ", by seed"
                for shape, pairs in best.items()
            ),
        ),
    ]


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
    """The leads of all seeds, and a line through them to where it crosses zero."""
    budgets = results.values("budget")
    first, top = math.log10(min(budgets)), math.log10(max(budgets))
    last = top + EXTRAPOLATED_DECADES
    for index, shape in enumerate(results.values("shape")):
        colour = plotting.colour(index)
        points = leads_by_budget(results, shape)
        panel.plot(
            [10**x for x, _ in points], [y for _, y in points], "o", color=colour, label=shape
        )
        if found := find_crossing(points):
            where = np.array([first, top if math.isinf(found.at) else min(found.at, last)])
            panel.plot(10**where, found.slope * where + found.constant, color=colour, lw=1.2)
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


def leads_of(results: Results, shape: str, budget: float) -> list[float]:
    """The leads of all seeds that have one."""
    values = [lead(results, shape, budget, seed) for seed in results.values("seed", shape=shape)]
    return [value for value in values if not math.isnan(value)]


def best_means(results: Results, shape: str, budget: float) -> dict[int, int]:
    """By seed: the mean loops with the lowest loss, 1 for fixed depth."""
    found = {
        seed: mean_losses(results, shape, budget, seed)
        for seed in results.values("seed", shape=shape)
    }
    return {seed: min(losses, key=losses.__getitem__) for seed, losses in found.items() if losses}


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


def leads_by_budget(results: Results, shape: str) -> list[tuple[float, float]]:
    """(log10 of the FLOPs, lead) of every budget and seed."""
    found = [
        (math.log10(budget), lead(results, shape, budget, seed))
        for seed in results.values("seed", shape=shape)
        for budget in results.values("budget", shape=shape)
    ]
    return [(budget, value) for budget, value in found if not math.isnan(value)]


class Crossing(NamedTuple):
    """A line through points, and where it crosses zero upwards."""

    slope: float
    constant: float
    at: float
    """Infinite if the line does not rise."""
    low: float
    high: float
    """Between them the line's 95 % band contains zero (Fieller's interval): `low` is -inf if it
    does so among the points, `high` is inf if it does so from `low` on."""


def find_crossing(points: Sequence[tuple[float, float]]) -> Crossing | None:
    """The crossing of points (x, y), mostly at y < 0; None for fewer than three points."""
    if len(points) < 3:
        return None
    x, y = np.array(points).T
    slope, constant = (float(value) for value in np.polyfit(x, y, 1))
    middle, mean, spread = x.mean(), y.mean(), ((x - x.mean()) ** 2).sum()
    residual = ((y - slope * x - constant) ** 2).sum() / (len(x) - 2)
    k = stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2) ** 2 * residual
    # the band's edges are zero where (mean + slope u)^2 = k (1 / n + u^2 / spread), u = x - middle
    a, b, c = slope**2 - k / spread, mean * slope, mean**2 - k / len(x)
    root = math.sqrt(max(b**2 - a * c, 0))
    low = -math.inf if c <= 0 else middle + c / (root - b) if root > b else math.inf
    high = middle + (root - b) / a if a > 0 else math.inf
    return Crossing(slope, constant, -constant / slope if slope > 0 else math.inf, low, high)


def describe_crossing(found: Crossing | None) -> str:
    if found is None or math.isinf(found.at):
        return "no crossing in sight"
    at, low, high = (f"{10**x:.0e}".replace("e+", "e") for x in (found.at, found.low, found.high))
    bounds = f"at least {low}" if math.isinf(found.high) else f"{low} to {high}"
    where = "not bounded by these runs" if math.isinf(found.low) else bounds
    return f"crossing near {at} FLOPs ({where})"
