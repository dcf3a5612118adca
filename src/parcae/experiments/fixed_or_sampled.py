"""Beyond the paper: training at one depth against sampled depths, tested at 1 to 64 loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_loss_by_loops
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.truncated_sampling import MEAN
from parcae.experiments.verdicts import Claim, describe, differences, lower, together

TRAINING = {"always 8 loops": "poisson-fill", "8 on average": "poisson"}
"""By name: the sampler. With mu_rec = mu_bwd the older sampler always loops 8 times, so the runs
are those of truncated-sampling."""


class FixedOrSampled(Experiment):
    name = "fixed-or-sampled"
    title = "Training at one depth or at sampled depths"
    in_paper = "beyond the paper"
    paper = (
        "Not in the paper. Elsewhere: fixed 8 loops gave perplexity 57.9 at T = 8 and 170.7 at 16; "
        "sampled depths 59.5 at 12 and 61.7 at 64."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, (name, sampler) in itertools.product(scale.seeds, TRAINING.items()):
            loop = {"mean_loops": MEAN, "backprop_loops": MEAN, "sampler": sampler}
            recipe = scale.recipe(scale.text(model={"loop": loop}), seed)
            yield Run(recipe, {"depth": name, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        fixed, sampled = TRAINING

        def pair(loops: int) -> tuple[dict[int, float], dict[int, float]]:
            return results.loss(loops, depth=sampled), results.loss(loops, depth=fixed)

        def gain(loops: int) -> str:
            a, b = pair(loops)
            return f"T = {loops}: {describe(differences(b, a))} nats"

        return [
            Claim(
                "Sampled depths have the lower loss at T = 16 and 64",
                together(lower(*pair(t)) for t in (16, 64)),
                f"{gain(16)}; {gain(64)}",
            ),
            Claim(
                "Sampled depths have the lower loss at T = 1 and 4",
                together(lower(*pair(t)) for t in (1, 4)),
                f"{gain(1)}; {gain(4)}",
            ),
            Claim(
                "A fixed depth has the lower loss at that depth, T = 8",
                lower(results.loss(8, depth=fixed), results.loss(8, depth=sampled)),
                gain(8),
            ),
        ]

    def table(self, results: Results) -> Table:
        loops = (1, 2, 4, 8, 16, 32, 64)
        rows = [
            (name, *(format_losses(results.loss(t, depth=name)) for t in loops))
            for name in TRAINING
        ]
        return ("training", *(f"T = {t}" for t in loops)), rows

    def draw(self, results: Results, path: Path) -> Path:
        curves = {name: {"depth": name} for name in TRAINING}
        with plotting.figure(width=6.0) as (canvas, panel):
            draw_loss_by_loops(panel, results, curves, TEST_LOOPS, mean=MEAN)
            panel.set_title("Trained at one depth or at several")
            return plotting.save(canvas, path)
