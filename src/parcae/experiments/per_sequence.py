"""Table "Per-microbatch against per-sequence": where a depth is drawn, at several test depths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.ablation_ladder import STEPS
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_loss_by_loops, draw_over_training, series
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower

LOOPS = (1, 4, 8, 16)
DRAWS = {
    "per micro-batch": STEPS["+ constrained A"],
    "per sequence": STEPS["+ per-sequence sampling"],
}
"""Two steps of the ladder: Parcae of the RDM setup has no prelude norm either."""


class PerSequence(Experiment):
    name = "per-sequence"
    title = "A depth per sequence or per micro-batch"
    in_paper = "the appendix on loss spikes"
    paper = (
        "Perplexity at T = 1, 4, 8, 16, per micro-batch and per sequence: 300.3, 36.8, 16.7, 13.8 "
        "and 70.5, 17.2, 14.1, 13.6 (100M); 167.6, 12.8, 10.4, 10.2 and 17.9, 10.5, 10.1, 10.1 "
        "(350M). No loss spikes, smaller residuals; training takes 1.8 % longer."
    )
    core_hours = 0.0

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, (draw, model) in itertools.product(scale.seeds, DRAWS.items()):
            recipe = scale.recipe(scale.text(model=model), seed)
            yield Run(recipe, {"draw": draw, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        batch, sequence = DRAWS

        def gain(loops: int) -> str:
            values = differences(
                results.loss(loops, draw=batch), results.loss(loops, draw=sequence)
            )
            return f"T = {loops}: {describe(values)} nats"

        at = {
            loops: (results.loss(loops, draw=sequence), results.loss(loops, draw=batch))
            for loops in LOOPS
        }
        residuals = [last(results, draw, "residual") for draw in (sequence, batch)]
        spikes = [
            {row["seed"]: row["spikes"] for row in results.where(draw=draw)}
            for draw in (sequence, batch)
        ]
        minutes = [
            {row["seed"]: row["core_minutes"] for row in results.where(draw=draw)}
            for draw in (sequence, batch)
        ]
        overhead = [
            100 * (minutes[0][s] / minutes[1][s] - 1) for s in minutes[0] if s in minutes[1]
        ]
        return [
            Claim(
                "Sampling per sequence lowers the loss at T = 1 by more than 0.1 nats",
                lower(*at[1], margin=0.1),
                f"{gain(1)}; {gain(4)}",
            ),
            Claim(
                "It does not raise the loss at T = 8 by more than 0.02 nats",
                lower(*at[8], margin=-0.02),
                f"{gain(8)}; {gain(16)}",
            ),
            Claim(
                "The state changes less in the last loop",
                lower(residuals[0], residuals[1]),
                f"residual {describe(residuals[0].values(), 2)} and "
                f"{describe(residuals[1].values(), 2)}",
            ),
            Claim(
                "There are fewer loss spikes",
                lower(spikes[0], spikes[1]),
                f"{sum(spikes[0].values())} and {sum(spikes[1].values())} in all runs; "
                f"processor time {describe(overhead, 1)} % more",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = [
            (draw, *(format_losses(results.loss(loops, draw=draw)) for loops in LOOPS))
            for draw in DRAWS
        ]
        return ("depth drawn", *(f"T = {loops}" for loops in LOOPS)), rows

    def draw(self, results: Results, path: Path) -> Path:
        curves = {draw: {"draw": draw} for draw in DRAWS}
        with plotting.figure(1, 2, width=4.8) as (canvas, (left, right)):
            draw_loss_by_loops(left, results, curves, TEST_LOOPS, mean=8)
            left.set_title("Held-out loss against loops")
            draw_over_training(right, results, curves, "telemetry", "residual", log=True)
            right.set(title="Change of the state in the last loop", ylabel="‖h_T − h_(T−1)‖")
            return plotting.save(canvas, path)


def last(results: Results, draw: str, column: str) -> dict[int, float]:
    """The last value of a telemetry column by seed."""
    found = {}
    for row in results.where(draw=draw):
        _, values = series(row, "telemetry", column)
        if values:
            found[row["seed"]] = values[-1]
    return found
