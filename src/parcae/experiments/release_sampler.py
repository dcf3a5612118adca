"""Beyond the paper: how much of the effect of a depth per sequence is a defect of a sampler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_loss_by_loops
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower, together, within

LOOPS = (1, 2, 4, 8, 16)
MEANS = (8, 16)
SETUPS = ("Transformer setup", "RDM setup")
RELEASE, PER_BATCH, PER_SEQUENCE = "release per micro-batch", "per micro-batch", "per sequence"
DRAWS: dict[str, dict[str, Any]] = {
    RELEASE: {"sampler": "release-per-batch", "draw_per": "micro-batch"},
    PER_BATCH: {"draw_per": "micro-batch"},
    PER_SEQUENCE: {},
}
CORRECT = (PER_BATCH, PER_SEQUENCE)
WORSE, EQUAL = 0.03, 0.02
"""Nats at T = 1: more than the first between the release and either correct draw, less than the
second between the two correct ones."""


class ReleaseSampler(Experiment):
    name = "release-sampler"
    title = "What the release's sampler per micro-batch does"
    in_paper = "beyond the paper"
    paper = (
        "The paper's loss at T = 1 is 8.99 with a depth per micro-batch and 3.38 with one per "
        "sequence. Its released code draws n loops per micro-batch and adds the loops with "
        "gradient to them; per sequence they are part of the n."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        plan = itertools.product(scale.seeds, SETUPS, MEANS, DRAWS.items())
        for seed, setup, mean, (draw, loop) in plan:
            model = {"loop": {"mean_loops": mean, **loop}}
            rdm = setup == "RDM setup"
            tree = scale.rdm("parcae-rdm", model=model) if rdm else scale.text(model=model)
            labels = {"setup": setup, "mu": mean, "draw": draw, "seed": seed}
            yield Run(scale.recipe(tree, seed), labels)

    def claims(self, results: Results) -> list[Claim]:
        cases = list(itertools.product(SETUPS, MEANS))

        def losses(draw: str, setup: str, mean: int, loops: int = 1) -> dict[int, float]:
            return results.loss(loops, draw=draw, setup=setup, mu=mean)

        def evidence(draw: str, other: str, loops: int = 1) -> str:
            parts = [
                f"{setup}, mu {mean}: "
                + describe(
                    differences(losses(draw, setup, mean, loops), losses(other, setup, mean, loops))
                )
                for setup, mean in cases
            ]
            return f"{draw} less {other} at T = {loops}, in nats: {'; '.join(parts)}"

        return [
            Claim(
                f"The release's sampler is worse at T = 1 by more than {WORSE} nats than either "
                "correct draw, in both setups, at mu = 8 and 16",
                together(
                    lower(losses(draw, *case), losses(RELEASE, *case), margin=WORSE)
                    for case in cases
                    for draw in CORRECT
                ),
                evidence(RELEASE, PER_BATCH),
            ),
            Claim(
                f"The two correct draws differ by less than {EQUAL} nats at T = 1",
                together(
                    within(differences(*(losses(draw, *case) for draw in CORRECT)), EQUAL)
                    for case in cases
                ),
                evidence(PER_BATCH, PER_SEQUENCE),
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for setup, mean, draw in itertools.product(SETUPS, MEANS, DRAWS):
            labels = {"setup": setup, "mu": mean, "draw": draw}
            losses = [format_losses(results.loss(loops, **labels)) for loops in LOOPS]
            rows.append((setup, str(mean), draw, *losses))
        return ("setup", "mu", "depth drawn", *(f"T = {loops}" for loops in LOOPS)), rows

    def draw(self, results: Results, path: Path) -> Path:
        with plotting.figure(2, 2, width=4.8) as (canvas, panels):
            cases = itertools.product(SETUPS, MEANS)
            for panel, (setup, mean) in zip(panels.flat, cases, strict=True):
                curves = {draw: {"draw": draw, "setup": setup, "mu": mean} for draw in DRAWS}
                draw_loss_by_loops(panel, results, curves, TEST_LOOPS, mean=mean)
                panel.set_title(f"{setup}, mean {mean}")
            return plotting.save(canvas, path)
