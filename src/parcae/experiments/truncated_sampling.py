"""Figure "Sampling of truncated recurrence": old sampler, corrected one, full backpropagation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch

from parcae import plotting
from parcae.config import LoopConfig
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_loss_by_loops
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.verdicts import Claim, describe, differences, positive, within
from parcae.model.depth import sample

MEAN = 8
SAMPLERS = {
    "old (k fixed)": "poisson-fill",
    "corrected": "poisson",
    "full backpropagation": "poisson-full",
}
LOOPS = (4, 16, 64)


class TruncatedSampling(Experiment):
    name = "truncated-sampling"
    title = "How truncated backpropagation samples depths"
    in_paper = "the appendix on truncated recurrence"
    paper = (
        "With mu_rec = mu_bwd = 8 all three have almost the same loss at T = 8; at T = 4, 16 and "
        "64 the corrected sampler follows full backpropagation and the old one does not."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, (name, sampler) in itertools.product(scale.seeds, SAMPLERS.items()):
            loop = {"mean_loops": MEAN, "backprop_loops": MEAN, "sampler": sampler}
            recipe = scale.recipe(scale.text(model={"loop": loop}), seed)
            yield Run(recipe, {"sampler": name, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        old, corrected, full = SAMPLERS

        def distances(name: str, loops: int) -> list[float]:
            pair = results.loss(loops, sampler=name), results.loss(loops, sampler=full)
            return [abs(value) for value in differences(*pair)]

        closer = [
            sum(b) / len(LOOPS) - sum(a) / len(LOOPS)
            for a, b in zip(
                zip(*(distances(corrected, t) for t in LOOPS), strict=False),
                zip(*(distances(old, t) for t in LOOPS), strict=False),
                strict=False,
            )
        ]
        evidence = "; ".join(
            f"T = {t}: {describe(distances(corrected, t))} and {describe(distances(old, t))}"
            for t in LOOPS
        )
        return [
            Claim(
                "Away from T = 8 the corrected sampler is closer to full backpropagation",
                positive(closer),
                f"distance in nats, corrected and old: {evidence}",
            ),
            Claim(
                "At T = 8 the corrected sampler is within 0.02 nats of full backpropagation",
                within(distances(corrected, MEAN), 0.02),
                describe(distances(corrected, MEAN)),
            ),
        ]

    def table(self, results: Results) -> Table:
        loops = (1, 4, 8, 16, 64)
        rows = [
            (name, *(format_losses(results.loss(t, sampler=name)) for t in loops))
            for name in SAMPLERS
        ]
        return ("sampler", *(f"T = {t}" for t in loops)), rows

    def draw(self, results: Results, path: Path) -> Path:
        curves = {name: {"sampler": name} for name in SAMPLERS}
        with plotting.figure(1, 2, width=4.8) as (canvas, (left, right)):
            draw_loss_by_loops(left, results, curves, TEST_LOOPS, mean=MEAN)
            left.set_title("Held-out loss against loops")
            for index, (name, sampler) in enumerate(SAMPLERS.items()):
                loop = LoopConfig(mean_loops=MEAN, backprop_loops=MEAN, sampler=sampler)
                depths = sample(loop, 20_000, torch.Generator().manual_seed(0)).loops
                shares = [depths.count(t) / len(depths) for t in range(1, 21)]
                right.plot(
                    range(1, 21),
                    shares,
                    color=plotting.colour(index),
                    marker="o",
                    label=name,
                    linestyle="--" if index == 2 else "-",
                )
            right.set(title="Depths in training", xlabel="loops T", ylabel="share", yscale="log")
            right.set_ylim(bottom=1e-4)
            plotting.value_ticks(right.xaxis, range(4, 21, 4))
            right.legend(fontsize=8.5)
            return plotting.save(canvas, path)
