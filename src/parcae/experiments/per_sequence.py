"""Table "Per-microbatch against per-sequence": where a depth is drawn, at several test depths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parcae import plotting
from parcae.experiments.ablation_ladder import STEPS
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_loss_by_loops, draw_over_training, series
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.verdicts import Claim, Verdict, describe, differences, lower, together

LOOPS = (1, 4, 8, 16)
DRAWS = {
    "per micro-batch": STEPS["+ constrained A"],
    "per sequence": STEPS["+ per-sequence sampling"],
}
"""Two steps of the ladder: Parcae of the RDM setup has no prelude norm either."""

Pair = tuple[dict[int, float], dict[int, float]]
"""Values by seed, per sequence and per micro-batch."""


class PerSequence(Experiment):
    name = "per-sequence"
    title = "A depth per sequence or per micro-batch"
    in_paper = "the appendix on loss spikes"
    paper = (
        "Perplexity at T = 1, 4, 8, 16, per micro-batch and per sequence: 300.3, 36.8, 16.7, 13.8 "
        "and 70.5, 17.2, 14.1, 13.6 (100M); 167.6, 12.8, 10.4, 10.2 and 17.9, 10.5, 10.1, 10.1 "
        "(350M). No loss spikes, smaller residuals; training takes 1.8 % longer."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        if scale.name == "paper":
            plan = itertools.product(scale.seeds, scale.rdm_sizes, DRAWS.items())
            for seed, size, (draw, model) in plan:
                recipe = scale.recipe(scale.rdm("parcae-rdm", size, model=model), seed)
                yield Run(recipe, {"draw": draw, "size": size, "seed": seed})
            return
        for seed, (draw, model) in itertools.product(scale.seeds, DRAWS.items()):
            recipe = scale.recipe(scale.text(model=model), seed)
            yield Run(recipe, {"draw": draw, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        sizes = _sizes(results)
        batch, sequence = DRAWS

        def gain(loops: int) -> str:
            parts = [differences(*_losses(results, loops, size)[::-1]) for size in sizes]
            return f"T = {loops}: {'; '.join(map(describe, parts))} nats"

        def at(loops: int, margin: float) -> Verdict:
            pairs = [_losses(results, loops, size) for size in sizes]
            return together(lower(*pair, margin=margin) for pair in pairs)

        residuals, spikes, minutes = (
            [(value(sequence, size), value(batch, size)) for size in sizes]
            for value in (
                lambda draw, size: last(results, draw, "residual", size=size),
                lambda draw, size: _column(results, "spikes", draw, size),
                lambda draw, size: _column(results, "core_minutes", draw, size),
            )
        )
        overhead = [
            100 * (long[seed] / short[seed] - 1)
            for long, short in minutes
            for seed in long
            if seed in short
        ]
        counts = [sum(sum(found.values()) for found in side) for side in zip(*spikes, strict=True)]
        changes = [
            f"{describe(small.values(), 2)} and {describe(large.values(), 2)}"
            for small, large in residuals
        ]
        return [
            Claim(
                "Sampling per sequence lowers the loss at T = 1 by more than 0.1 nats",
                at(1, 0.1),
                f"{gain(1)}; {gain(4)}",
            ),
            Claim(
                "It does not raise the loss at T = 8 by more than 0.02 nats",
                at(8, -0.02),
                f"{gain(8)}; {gain(16)}",
            ),
            Claim(
                "The state changes less in the last loop",
                together(lower(*pair) for pair in residuals),
                f"residual {'; '.join(changes)}",
            ),
            Claim(
                "There are fewer loss spikes",
                together(lower(*pair) for pair in spikes),
                f"{counts[0]} and {counts[1]} in all runs; "
                f"processor time {describe(overhead, 1)} % more",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for size, draw in itertools.product(_sizes(results), DRAWS):
            losses = [results.loss(loops, draw=draw, size=size) for loops in LOOPS]
            rows.append((_name(draw, size), *map(format_losses, losses)))
        return ("depth drawn", *(f"T = {loops}" for loops in LOOPS)), rows

    def draw(self, results: Results, path: Path) -> Path:
        curves = {
            _name(draw, size): {"draw": draw, "size": size}
            for size, draw in itertools.product(_sizes(results), DRAWS)
        }
        with plotting.figure(1, 2, width=4.8) as (canvas, (left, right)):
            draw_loss_by_loops(left, results, curves, TEST_LOOPS, mean=8)
            left.set_title("Held-out loss against loops")
            draw_over_training(right, results, curves, "telemetry", "residual", log=True)
            right.set(title="Change of the state in the last loop", ylabel="‖h_T − h_(T−1)‖")
            return plotting.save(canvas, path)


def _sizes(results: Results) -> list[str | None]:
    """The sizes of the paper's scale; there is one elsewhere, without a name."""
    return results.values("size") or [None]


def _name(draw: str, size: str | None) -> str:
    return f"{size} {draw}" if size else draw


def _losses(results: Results, loops: int, size: str | None) -> Pair:
    """Losses by seed, per sequence and per micro-batch."""
    batch, sequence = (results.loss(loops, draw=draw, size=size) for draw in DRAWS)
    return sequence, batch


def _column(results: Results, name: str, draw: str, size: str | None) -> dict[int, float]:
    return {row["seed"]: row[name] for row in results.where(draw=draw, size=size)}


def last(results: Results, draw: str, column: str, **labels: Any) -> dict[int, float]:
    """The last value of a telemetry column by seed."""
    found = {}
    for row in results.where(draw=draw, **labels):
        _, values = series(row, "telemetry", column)
        if values:
            found[row["seed"]] = values[-1]
    return found
