"""Appendix "Selecting mu_rec and mu_bwd": one fixed, the other varied, with both samplers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses, loss_at
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower, positive
from parcae.recipe import merge

SAMPLERS = {"old": "poisson-fill", "corrected": "poisson"}
FIXED_BACKWARD = 4


class Grid(NamedTuple):
    """Two lines: mu_rec varies at mu_bwd = 4, and mu_bwd varies at the mu_rec `fixed`."""

    means: tuple[int, ...]
    fixed: int
    backward: tuple[int, ...]


SMALL = Grid((4, 8, 16), 16, (2, 4, 8))
LARGE = Grid((4, 8, 14, 20, 26, 32), 20, (4, 6, 8, 10, 12))
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

    def runs(self, scale: Scale) -> Iterator[Run]:
        grid = LARGE if scale.name == "paper" else SMALL
        pairs = [(mean, FIXED_BACKWARD) for mean in grid.means]
        pairs += [(grid.fixed, backward) for backward in grid.backward]
        budget = SHORT.get(scale.name, {})
        for seed, (name, sampler), (mean, backward) in itertools.product(
            scale.few_seeds, SAMPLERS.items(), dict.fromkeys(pairs)
        ):
            loop = {"mean_loops": mean, "backprop_loops": backward, "sampler": sampler}
            tree = scale.text(model={"loop": loop}, budget=budget)
            if scale.name == "paper":  # validated at T = mu_rec too
                loops = sorted({*tree["run"]["validation_loops"], mean})
                tree = merge(tree, {"run": {"validation_loops": loops}})
            recipe = scale.recipe(tree, seed)
            yield Run(recipe, {"sampler": name, "mu": mean, "backward": backward, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        def loss(mean: int, backward: int, sampler: str) -> dict[int, float]:
            return results.loss(mean, mu=mean, backward=backward, sampler=sampler)

        grid = _grid(results)
        few, many = grid.backward[0], grid.backward[-1]
        more = [
            value
            for sampler in SAMPLERS
            for value in differences(
                loss(grid.fixed, few, sampler), loss(grid.fixed, many, sampler)
            )
        ]
        gains = [
            value
            for sampler in SAMPLERS
            for value in differences(
                loss(grid.fixed, FIXED_BACKWARD, sampler), loss(8, FIXED_BACKWARD, sampler)
            )
        ]
        corrected, old = loss(4, 4, "corrected"), loss(4, 4, "old")
        return [
            Claim(
                f"With mu_bwd = 4, mu_rec = {grid.fixed} is worse than 8",
                positive(gains),
                f"mu_rec {grid.fixed} less 8: {describe(gains, 4, PAIR)} nats",
            ),
            Claim(
                f"More loops with gradient help at mu_rec = {grid.fixed}",
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
        grid = _grid(results)
        with plotting.figure(1, 2, width=4.4) as (canvas, (left, right)):
            for index, sampler in enumerate(SAMPLERS):
                colour = plotting.colour(index)
                for panel, label, fixed in (
                    (left, "mu", {"backward": FIXED_BACKWARD}),
                    (right, "backward", {"mu": grid.fixed}),
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
            right.set(title=f"μ_rec = {grid.fixed}", xlabel="μ_bwd")
            left.legend(fontsize=8.5)
            return plotting.save(canvas, path)


def _grid(results: Results) -> Grid:
    """The grid of these runs."""
    return LARGE if {*results.values("mu")} - {*SMALL.means} else SMALL
