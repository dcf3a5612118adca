"""Table "Comparing Parcae to fixed-depth Transformers": the same parameters and the same data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from parcae import plotting
from parcae.experiments.experiment import (
    Experiment,
    Results,
    Row,
    Run,
    Table,
    core_record,
    format_losses,
    format_scores,
    wikitext_record,
)
from parcae.experiments.figures import draw_points
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import Claim, describe, differences, positive, together

LOOPS = 8
FAMILIES = ("transformer", "parcae")
NAMES = {"transformer": "Transformer", "parcae": "Parcae"}
SCORES = {"wikitext": "WikiText", "core": "CORE", "core-extended": "CORE-Extended"}
"""Columns of the table, by their names in a row."""
PAIR = "seed-size pair"
LONGER = {"micro": (4, 12), "toy": (2,)}
"""How many times the data the smallest size is trained on again: looping needs enough. Twelve
times is the whole text once."""
LARGE, LARGE_DATA = "2.3M", 5
"""At micro scale, a model ten times as large with more context and vocabulary, on this many times
the tokens. Its losses compare with each other only."""


class TransformerComparison(Experiment):
    name = "transformer-comparison"
    title = "Parcae against Transformers"
    in_paper = "the table of the Transformer setup"
    paper = (
        "Validation perplexity of the Transformer and of Parcae at T = 8: 21.48 and 19.06 (140M), "
        "15.79 and 14.49 (370M), 13.08 and 12.49 (770M), 11.95 and 11.42 (1.3B): 0.12 to 0.05 nats "
        "lower. CORE is 1.0 to 3.0 points higher; Parcae covers 23 to 88 % of the gap to the next "
        "larger Transformer in CORE."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, family in itertools.product(scale.seeds, reversed(FAMILIES)):
            # The largest Transformer only marks the end of the gap.
            sizes = (
                scale.sizes
                if family == "transformer" or scale.name == "paper"
                else scale.sizes[:-1]
            )
            for size in sizes:
                recipe = scale.recipe(scale.text(family, size), seed)
                yield Run(recipe, {"model": family, "size": size, "data": 1, "seed": seed})
            for data in LONGER.get(scale.name, ()):
                steps = data * scale.text()["budget"]["steps"]
                tree = scale.text(family, sizes[0], budget={"steps": steps})
                labels = {"model": family, "size": sizes[0], "data": data, "seed": seed}
                yield Run(scale.recipe(tree, seed), labels)
        if scale.name == "micro":
            yield from _large_runs(scale)

    def measure(self, run: Run, store: Store) -> Row:
        return {
            **super().measure(run, store),
            **wikitext_record(run, store, LOOPS),
            **core_record(run, store, LOOPS),
        }

    def claims(self, results: Results) -> list[Claim]:
        gains = {
            (size, data): _gains(results, size, data)
            for data in results.values("data")
            for size in results.values("size", model="parcae", data=data)
        }
        sizes = results.values("size", model="transformer", data=1)
        shares = gap_shares(sizes, lambda model, size: _losses(results, model, size, 1))
        core = gap_shares(sizes, lambda model, size: _core_errors(results, model, size))
        in_core = f", in CORE {describe(core, 2, PAIR)}" if core else ""
        claims = [
            Claim(
                "Parcae has a lower loss than the Transformer of its size",
                together(positive(gain.values()) for (_, data), gain in gains.items() if data == 1),
                _describe_gains(gains, 1),
            ),
            Claim(
                "Parcae covers a part of the gap to the next larger Transformer",
                positive(shares),
                f"share of the gap in loss: {describe(shares, 2, PAIR)}{in_core}",
            ),
        ]
        small = gains.get((sizes[0], 1), {}) if sizes else {}
        longer = [data for data in results.values("data", size=next(iter(sizes), None)) if data > 1]
        for data in longer if results.rows else LONGER["micro"]:
            long = gains.get((sizes[0], data), {}) if sizes else {}
            more = differences(long, small)
            claims += [
                Claim(
                    f"With {data} times the data Parcae has the lower loss",
                    positive(long.values()),
                    _describe_gains(gains, data),
                ),
                Claim(
                    f"The lead of Parcae is larger with {data} times the data",
                    positive(more),
                    f"by {describe(more)} nats",
                ),
            ]
        if results.where(size=LARGE) or not results.rows:
            large = gains.get((LARGE, LARGE_DATA), {})
            statement = f"With {LARGE} parameters Parcae has the lower loss"
            evidence = _describe_gains(gains, LARGE_DATA)
            claims.append(Claim(statement, positive(large.values()), evidence))
        return claims

    def table(self, results: Results) -> Table:
        measured = {
            name: title
            for name, title in SCORES.items()
            if any(row.get(name) is not None for row in results.rows)
        }
        rows = []
        for data, size, model in _groups(results):
            found = results.where(size=size, model=model, data=data)
            losses = [results.loss(t, size=size, model=model, data=data) for t in (1, 4, 8, 16)]
            at = [format_losses(loss) for loss in losses]
            cells = at if model == "parcae" else [at[0], "", "", ""]
            counts = (f"{found[0]['parameters']:,}", f"{found[0]['tokens']:,}")
            scores = [format_scores(found, name) for name in measured]
            rows.append((size, NAMES[model], *counts, *cells, *scores))
        at = ("T = 1", "T = 4", "T = 8", "T = 16")
        return ("size", "model", "parameters", "tokens", *at, *measured.values()), rows

    def draw(self, results: Results, path: Path) -> Path:
        every = _groups(results)
        large = [group for group in every if group[1] == LARGE]
        panels = [[group for group in every if group not in large], *([large] if large else [])]
        shape = {"width": 11 / len(panels), "ratios": [max(len(groups), 2) for groups in panels]}
        with plotting.figure(1, len(panels), **shape) as (canvas, axes):
            for groups, panel in zip(panels, np.ravel(axes), strict=True):
                points = {
                    _title(data, size, model): list(_losses(results, model, size, data).values())
                    for data, size, model in groups
                }
                colours = [FAMILIES.index(model) for _, _, model in groups]
                draw_points(panel, points, "held-out loss, nats per token", colours)
            first, *others = np.ravel(axes)
            first.set_title(f"The same data, nearly the same parameters; Parcae at T = {LOOPS}")
            for panel in others:
                panel.set_title(f"{LARGE} parameters")
            return plotting.save(canvas, path)


def _large_runs(scale: Scale) -> Iterator[Run]:
    for seed, family in itertools.product(scale.few_seeds, FAMILIES):
        model = {"preset": f"{family}-3m", "vocab_size": 2048, "context_length": 128}
        tree = scale.text(family, "w128", model=model, budget={"steps": 500 * LARGE_DATA})
        labels = {"model": family, "size": LARGE, "data": LARGE_DATA, "seed": seed}
        yield Run(scale.recipe(tree, seed), labels)


def gap_shares(
    sizes: Sequence[str], errors: Callable[[str, str], Mapping[int, float]]
) -> list[float]:
    """How much of the way from a Transformer to the next larger one Parcae covers, of each seed.

    `errors(model, size)`: what is to be small, by seed.
    """
    shares = []
    for size, larger in itertools.pairwise(sizes):
        small, looped = (errors(model, size) for model in FAMILIES)
        large = errors("transformer", larger)
        for seed in sorted({*small} & {*looped} & {*large}):
            gap = small[seed] - large[seed]
            shares.append((small[seed] - looped[seed]) / gap if gap > 0 else math.nan)
    return shares


def _core_errors(results: Results, model: str, size: str) -> dict[int, float]:
    """100 - CORE by seed, of runs in which it was measured."""
    rows = results.where(model=model, size=size, data=1)
    return {row["seed"]: 100 - row["core"] for row in rows if row.get("core") is not None}


def _losses(results: Results, model: str, size: str, data: int) -> dict[int, float]:
    loops = LOOPS if model == "parcae" else 1
    return results.loss(loops, model=model, size=size, data=data)


def _gains(results: Results, size: str, data: int) -> dict[int, float]:
    """How much lower the loss of Parcae is, by seed."""
    large, small = (_losses(results, model, size, data) for model in FAMILIES)
    return {seed: large[seed] - small[seed] for seed in sorted({*large} & {*small})}


def _groups(results: Results) -> list[tuple[int, str, str]]:
    """(data, size, model) of the groups of runs that there are."""
    every = itertools.product(results.values("data"), results.values("size"), FAMILIES)
    return [
        (data, size, model)
        for data, size, model in every
        if results.where(data=data, size=size, model=model)
    ]


def _title(data: int, size: str, model: str) -> str:
    return f"{NAMES[model]}\n{size}" + (f"\n{data}x data" if data > 1 else "")


def _describe_gains(gains: Mapping[tuple[str, int], Mapping[int, float]], data: int) -> str:
    parts = [
        f"{size}: {describe(g.values())} nats lower" for (size, d), g in gains.items() if d == data
    ]
    return "; ".join(parts)
