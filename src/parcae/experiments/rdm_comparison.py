"""Table "Zero-shot and perplexity results trained on the RDM setup": Parcae against both RDMs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.experiment import (
    Experiment,
    Results,
    Row,
    Run,
    Table,
    format_losses,
    format_scores,
    wikitext_record,
    zero_shot_record,
)
from parcae.experiments.figures import draw_loss_by_loops, draw_over_training
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import Claim, describe, differences, lower

LOOPS = {"100m": 16}
"""The mean loops of a size in training, at which its models are compared; 8 for the others."""
MODELS = {
    "Parcae": "parcae-rdm",
    "RDM, residual norm": "rdm",
    "RDM, pre-norm": "rdm-prenorm",
}
"""Families of presets by name."""


class RdmComparison(Experiment):
    name = "rdm-comparison"
    title = "Parcae against recurrent depth models"
    in_paper = "the table of the RDM setup"
    paper = (
        "Validation perplexity of the residual-norm RDM and of Parcae: 14.23 and 13.59 (100M), "
        "10.76 and 10.09 (350M): 0.046 and 0.064 nats lower. WikiText 63.27 and 60.33, 41.31 and "
        "37.53. Average of the zero-shot tasks 45.03 and 46.83, 49.45 and 50.12."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, size in itertools.product(scale.seeds, scale.rdm_sizes):
            for model, family in MODELS.items():
                recipe = scale.recipe(scale.rdm(family, size), seed)
                yield Run(recipe, {"model": model, "size": size, "seed": seed})

    def measure(self, run: Run, store: Store) -> Row:
        return {
            **super().measure(run, store),
            **wikitext_record(run, store, loops_of(run.labels["size"])),
            **zero_shot_record(run, store, loops_of(run.labels["size"])),
        }

    def claims(self, results: Results) -> list[Claim]:
        claims = []
        sizes = results.values("size") or [None]
        for size, rival in itertools.product(sizes, list(MODELS)[1:]):
            loops = loops_of(size)
            parcae = results.loss(loops, size=size, model="Parcae")
            losses = results.loss(loops, size=size, model=rival)
            of_size = f" at {size}" if len(sizes) > 1 else ""
            claims.append(
                Claim(
                    f"Parcae has a lower loss than the {rival.replace(', ', ' with ')}{of_size}",
                    lower(parcae, losses),
                    f"{describe(differences(losses, parcae))} nats lower at T = {loops}",
                )
            )
        return claims

    def table(self, results: Results) -> Table:
        rows = []
        for size, model in itertools.product(results.values("size"), MODELS):
            found = results.where(size=size, model=model)
            if found:
                at = [format_losses(results.loss(t, size=size, model=model)) for t in (1, 4, 8, 16)]
                scores = [format_scores(found, name) for name in ("wikitext", "zero_shot")]
                rows.append((size, model, f"{found[0]['parameters']:,}", *at, *scores))
        at = ("T = 1", "T = 4", "T = 8", "T = 16")
        return ("size", "model", "parameters", *at, "WikiText", "zero-shot, %"), rows

    def draw(self, results: Results, path: Path) -> Path:
        sizes = results.values("size")
        curves = {
            f"{model}, {size}" if len(sizes) > 1 else model: {"model": model, "size": size}
            for size, model in itertools.product(sizes, MODELS)
            if results.where(model=model, size=size)
        }
        with plotting.figure(1, 2, width=4.8) as (canvas, (left, right)):
            mean = loops_of(sizes[-1] if sizes else None)
            draw_loss_by_loops(left, results, curves, TEST_LOOPS, mean=mean)
            left.set_title("Held-out loss against loops")
            draw_over_training(right, results, curves, "training", "loss")
            right.set(title="Loss in training", ylabel="nats per token")
            return plotting.save(canvas, path)


def loops_of(size: str | None) -> int:
    return LOOPS.get(size or "", 8)
