"""Table "Comparing Parcae to fixed-depth Transformers": the same parameters and the same data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_points
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower, positive, together

LOOPS = 8


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
    core_hours = 2.8

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, family in itertools.product(scale.seeds, ("parcae", "transformer")):
            # The largest Transformer only marks the end of the gap.
            sizes = (
                scale.sizes
                if family == "transformer" or scale.name == "paper"
                else scale.sizes[:-1]
            )
            for size in sizes:
                recipe = scale.recipe(scale.text(family, size), seed)
                yield Run(recipe, {"model": family, "size": size, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        parts, shares, texts = [], [], []
        sizes = results.values("size", model="transformer")
        for size in results.values("size", model="parcae"):
            parcae = results.loss(LOOPS, model="parcae", size=size)
            transformer = results.loss(1, model="transformer", size=size)
            parts.append(lower(parcae, transformer))
            gain = differences(transformer, parcae)
            texts.append(f"{size}: {describe(gain)} nats lower")
            larger = sizes[sizes.index(size) + 1 :] if size in sizes else []
            if larger:
                gap = differences(transformer, results.loss(1, model="transformer", size=larger[0]))
                shares += [
                    part / whole if whole > 0 else math.nan
                    for part, whole in zip(gain, gap, strict=False)
                ]
        return [
            Claim(
                "Parcae has a lower loss than the Transformer of its size",
                together(parts),
                "; ".join(texts),
            ),
            Claim(
                "Parcae covers a part of the gap to the next larger Transformer",
                positive(shares),
                f"share of the gap in loss: {describe(shares, 2)}",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for size, model in itertools.product(results.values("size"), ("transformer", "parcae")):
            found = results.where(size=size, model=model)
            if found:
                at = [format_losses(results.loss(t, size=size, model=model)) for t in (1, 4, 8, 16)]
                cells = at if model == "parcae" else [at[0], "", "", ""]
                rows.append((size, model, f"{found[0]['parameters']:,}", *cells))
        return ("size", "model", "parameters", "T = 1", "T = 4", "T = 8", "T = 16"), rows

    def draw(self, results: Results, path: Path) -> Path:
        groups = {}
        for size, model in itertools.product(results.values("size"), ("transformer", "parcae")):
            losses = results.loss(LOOPS, size=size, model=model)
            if losses:
                groups[f"{model}\n{size}"] = list(losses.values())
        with plotting.figure(width=6.4) as (canvas, panel):
            draw_points(panel, groups, "held-out loss, nats per token")
            panel.set_title(f"The same parameters and data; Parcae at T = {LOOPS}")
            return plotting.save(canvas, path)
