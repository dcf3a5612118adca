"""Beyond the paper: Euler's rule against the exact zero-order hold for B."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_points
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower

RULES = {"Euler": "zoh-euler", "exact ZOH": "zoh"}
LOOPS = 8
MORE_SEEDS = 2
"""The effect is small: two seeds more than elsewhere."""


class Discretisation(Experiment):
    name = "discretisation"
    title = "Euler's rule or exact zero-order hold for B"
    in_paper = "beyond the paper"
    paper = (
        "The paper uses Euler's rule. A run elsewhere reports 2.929 with Euler's rule and 2.914 "
        "with the exact hold at 140M, and 2.640 and 2.639 at 370M."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        seeds = range(scale.seed_count + MORE_SEEDS)
        for seed, (name, rule) in itertools.product(seeds, RULES.items()):
            recipe = scale.recipe(scale.text(model={"discretisation": rule}), seed)
            yield Run(recipe, {"rule": name, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        euler, exact = (results.loss(LOOPS, rule=rule) for rule in RULES)
        gains = differences(euler, exact)
        evidence = f"Euler less exact hold at T = {LOOPS}: {describe(gains, 4)} nats"
        return [Claim("The exact hold has the lower loss", lower(exact, euler), evidence)]

    def table(self, results: Results) -> Table:
        loops = (1, 4, 8, 16)
        rows = [
            (rule, *(format_losses(results.loss(t, rule=rule)) for t in loops)) for rule in RULES
        ]
        return ("rule for B", *(f"T = {t}" for t in loops)), rows

    def draw(self, results: Results, path: Path) -> Path:
        groups = {rule: list(results.loss(LOOPS, rule=rule).values()) for rule in RULES}
        with plotting.figure(width=4.4) as (canvas, panel):
            draw_points(panel, groups, "held-out loss, nats per token")
            panel.set_title(f"One point per seed, T = {LOOPS}")
            return plotting.save(canvas, path)
