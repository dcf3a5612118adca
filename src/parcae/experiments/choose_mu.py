"""Appendix "Selecting mu_rec and mu_bwd": one fixed, the other varied, with both samplers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses, loss_at
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower, positive

SAMPLERS = {"old": "poisson-fill", "corrected": "poisson"}
FIXED_BACKWARD, FIXED_MEAN = 4, 16
MEANS = (4, 8, 16)
BACKWARD = (2, 4, 8)
"""The paper varies mu_rec to 32 at mu_bwd = 4, and mu_bwd from 4 to 12 at mu_rec = 20."""
SHORT = {"micro": {"steps": 500}, "toy": {"steps": 3}}
PAIR = "seed-sampler pair"


class ChooseMu(Experiment):
    name = "choose-mu"
    title = "Choosing mu_rec and mu_bwd"
    in_paper = "the appendix on selecting them"
    paper = (
        "Loss at T = mu_rec with mu_bwd = 4 and mu_rec = 4, 8, 14, 20, 26, 32: 2.477, 2.453, "
        "2.456, 2.457, 2.458, 2.458. With mu_rec = 20 and mu_bwd = 4, 6, 8, 10, 12: 2.500, 2.490, "
        "2.480, 2.479, 2.474. Both with the old sampler."
    )
    core_hours = 0.6

    def runs(self, scale: Scale) -> Iterator[Run]:
        pairs = [(mean, FIXED_BACKWARD) for mean in MEANS]
        pairs += [(FIXED_MEAN, backward) for backward in BACKWARD]
        budget = SHORT.get(scale.name, {})
        for seed, (name, sampler), (mean, backward) in itertools.product(
            scale.few_seeds, SAMPLERS.items(), dict.fromkeys(pairs)
        ):
            loop = {"mean_loops": mean, "backprop_loops": backward, "sampler": sampler}
            recipe = scale.recipe(scale.text(model={"loop": loop}, budget=budget), seed)
            yield Run(recipe, {"sampler": name, "mu": mean, "backward": backward, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        def loss(mean: int, backward: int, sampler: str) -> dict[int, float]:
            return results.loss(mean, mu=mean, backward=backward, sampler=sampler)

        few, many = BACKWARD[0], BACKWARD[-1]
        more = [
            value
            for sampler in SAMPLERS
            for value in differences(
                loss(FIXED_MEAN, few, sampler), loss(FIXED_MEAN, many, sampler)
            )
        ]
        gains = [
            value
            for sampler in SAMPLERS
            for value in differences(
                loss(FIXED_MEAN, FIXED_BACKWARD, sampler), loss(8, FIXED_BACKWARD, sampler)
            )
        ]
        corrected, old = loss(4, 4, "corrected"), loss(4, 4, "old")
        return [
            Claim(
                f"With mu_bwd = 4, mu_rec = {FIXED_MEAN} is worse than 8",
                positive(gains),
                f"{describe(gains, 4, PAIR)} nats higher",
            ),
            Claim(
                f"More loops with gradient help at mu_rec = {FIXED_MEAN}",
                positive(more),
                f"mu_bwd {few} to {many}: {describe(more, 4, PAIR)} nats",
            ),
            Claim(
                "At mu_rec = mu_bwd = 4 the corrected sampler has the lower loss",
                lower(corrected, old),
                f"{describe(differences(old, corrected))} nats",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for mean, backward in sorted({(row["mu"], row["backward"]) for row in results.rows}):
            labels = {"mu": mean, "backward": backward}
            cells = [format_losses(results.loss(mean, sampler=s, **labels)) for s in SAMPLERS]
            rows.append((str(mean), str(backward), *cells))
        return ("mu_rec", "mu_bwd", "old sampler", "corrected sampler"), rows

    def draw(self, results: Results, path: Path) -> Path:
        with plotting.figure(1, 2, width=4.4) as (canvas, (left, right)):
            for index, sampler in enumerate(SAMPLERS):
                colour = plotting.colour(index)
                for panel, label, fixed in (
                    (left, "mu", {"backward": FIXED_BACKWARD}),
                    (right, "backward", {"mu": FIXED_MEAN}),
                ):
                    places = sorted(results.values(label, sampler=sampler, **fixed))
                    means = []
                    for place in places:
                        found = results.where(sampler=sampler, **fixed, **{label: place})
                        losses = [loss_at(row, row["mu"]) for row in found]
                        panel.plot([place] * len(losses), losses, ".", color=colour, alpha=0.5)
                        means.append(sum(losses) / len(losses))
                    panel.plot(places, means, marker="o", label=f"{sampler} sampler", color=colour)
            left.set(title=f"μ_bwd = {FIXED_BACKWARD}", xlabel="μ_rec", ylabel="loss at T = μ_rec")
            right.set(title=f"μ_rec = {FIXED_MEAN}", xlabel="μ_bwd")
            left.legend(fontsize=8.5)
            return plotting.save(canvas, path)
