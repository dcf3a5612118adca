"""Appendix "Selecting mu_rec and mu_bwd": one fixed, the other varied, with both samplers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower, positive

SAMPLERS = {"old": "poisson-fill", "corrected": "poisson"}
FIXED_BACKWARD, FIXED_MEAN = 4, 14
MEANS = (4, 8, 14, 20)
BACKWARD = (2, 4, 8, 12)
"""The paper varies mu_rec to 32 at mu_bwd = 4, and mu_bwd from 4 to 12 at mu_rec = 20."""


class ChooseMu(Experiment):
    name = "choose-mu"
    title = "Choosing mu_rec and mu_bwd"
    in_paper = "the appendix on selecting them"
    paper = (
        "Loss at T = mu_rec with mu_bwd = 4 and mu_rec = 4, 8, 14, 20, 26, 32: 2.477, 2.453, "
        "2.456, 2.457, 2.458, 2.458. With mu_rec = 20 and mu_bwd = 4, 6, 8, 10, 12: 2.500, 2.490, "
        "2.480, 2.479, 2.474. Both with the old sampler."
    )
    core_hours = 3.5

    def runs(self, scale: Scale) -> Iterator[Run]:
        pairs = [(mean, FIXED_BACKWARD) for mean in MEANS]
        pairs += [(FIXED_MEAN, backward) for backward in BACKWARD]
        # One seed: the claims are about a trend over four runs.
        for (name, sampler), (mean, backward) in itertools.product(
            SAMPLERS.items(), dict.fromkeys(pairs)
        ):
            loop = {"mean_loops": mean, "backprop_loops": backward, "sampler": sampler}
            recipe = scale.recipe(scale.text(model={"loop": loop}), 0)
            yield Run(recipe, {"sampler": name, "mu": mean, "backward": backward, "seed": 0})

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
            for value in differences(loss(20, 4, sampler), loss(8, 4, sampler))
        ]
        corrected, old = loss(4, 4, "corrected"), loss(4, 4, "old")
        return [
            Claim(
                "With mu_bwd = 4, mu_rec = 20 is no better than 8",
                positive(gains),
                f"{describe(gains)} nats higher, over both samplers",
            ),
            Claim(
                f"More loops with gradient help at mu_rec = {FIXED_MEAN}",
                positive(more),
                f"mu_bwd {few} to {many}: {describe(more)} nats, over both samplers",
            ),
            Claim(
                "At mu_rec = mu_bwd = 4 the corrected sampler has the lower loss",
                lower(corrected, old),
                f"{describe(differences(old, corrected))} nats",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for row in results.where(sampler="corrected"):
            labels = {"mu": row["mu"], "backward": row["backward"]}
            cells = [format_losses(results.loss(row["mu"], sampler=s, **labels)) for s in SAMPLERS]
            rows.append((str(row["mu"]), str(row["backward"]), *cells))
        return ("mu_rec", "mu_bwd", "old sampler", "corrected sampler"), rows

    def draw(self, results: Results, path: Path) -> Path:
        with plotting.figure(1, 2, width=4.4) as (canvas, (left, right)):
            for index, sampler in enumerate(SAMPLERS):
                of = results.where(sampler=sampler)
                means = {r["mu"]: r["losses"].get(str(r["mu"])) for r in of if r["backward"] == 4}
                backs = {
                    r["backward"]: r["losses"].get(str(r["mu"]))
                    for r in of
                    if r["mu"] == FIXED_MEAN
                }
                for panel, found in ((left, means), (right, dict(sorted(backs.items())))):
                    known = {k: v for k, v in sorted(found.items()) if v is not None}
                    panel.plot(
                        known.keys(),
                        known.values(),
                        marker="o",
                        label=sampler,
                        color=plotting.colour(index),
                    )
            left.set(title="μ_bwd = 4", xlabel="μ_rec", ylabel="loss at T = μ_rec")
            right.set(title=f"μ_rec = {FIXED_MEAN}", xlabel="μ_bwd")
            left.legend(fontsize=8.5)
            return plotting.save(canvas, path)
