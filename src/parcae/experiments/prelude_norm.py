"""Appendix "Ablation of prelude normalization": norms and loss with and without it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from parcae import plotting
from parcae.experiments.ablation_ladder import STEPS
from parcae.experiments.experiment import (
    Experiment,
    Results,
    Row,
    Run,
    Table,
    format_losses,
)
from parcae.experiments.figures import draw_over_training
from parcae.experiments.per_sequence import last
from parcae.experiments.scales import Scale
from parcae.experiments.store import Store
from parcae.experiments.verdicts import Claim, describe, differences, lower, positive
from parcae.runs import read_metrics

LOOPS = 8
NORMS = {
    "with": STEPS["+ prelude norm"],
    "without": STEPS["+ per-sequence sampling"],
}


class PreludeNorm(Experiment):
    name = "prelude-norm"
    title = "The prelude norm and the norms of the loop"
    in_paper = "the appendix on prelude normalisation and its diagnosis"
    paper = (
        "At 1.3B without the norm, loss spikes and growing states appear after 170k steps; the "
        "spectral norms of A and B stay level, that of C grows while its expansion of actual "
        "states stays small; the first loop injects the growth. With the norm the state stays "
        "smaller and the loss is lower at 140M and 370M."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, (draw, model) in itertools.product(scale.seeds, NORMS.items()):
            recipe = scale.recipe(scale.text(model=model), seed)
            yield Run(recipe, {"draw": draw, "seed": seed})

    def measure(self, run: Run, store: Store) -> Row:
        telemetry = read_metrics(store.folder(run)).get("telemetry", [{}])
        names = ("prelude_norms", "first_loop_norms", "state_norms")
        return {**super().measure(run, store), **{name: telemetry[-1].get(name) for name in names}}

    def claims(self, results: Results) -> list[Claim]:
        loss = {draw: results.loss(LOOPS, draw=draw) for draw in NORMS}
        norms = {draw: last(results, draw, "state_norm") for draw in NORMS}
        growth = []
        for row in results.where(draw="with"):
            values = row["telemetry"].get("readout_norm") or []
            if values and values[0] and values[-1]:
                growth.append(values[-1] - values[0])
        return [
            Claim(
                "The prelude norm keeps the state smaller",
                lower(norms["with"], norms["without"]),
                f"norm of the state {describe(norms['with'].values(), 1)} with, "
                f"{describe(norms['without'].values(), 1)} without",
            ),
            Claim(
                "The prelude norm lowers the loss",
                lower(loss["with"], loss["without"]),
                f"{describe(differences(loss['without'], loss['with']))} nats at T = {LOOPS}",
            ),
            Claim(
                "The spectral norm of C grows over training",
                positive(growth),
                f"by {describe(growth, 2)}",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = [
            (
                draw,
                *(format_losses(results.loss(t, draw=draw)) for t in (1, 8, 24)),
                describe(last(results, draw, "state_norm").values(), 1).partition(" (")[0],
                describe(last(results, draw, "readout_norm").values(), 2).partition(" (")[0],
            )
            for draw in NORMS
        ]
        return ("prelude norm", "T = 1", "T = 8", "T = 24", "norm of h_8", "norm of C"), rows

    def draw(self, results: Results, path: Path) -> Path:
        curves = {f"{draw} norm": {"draw": draw} for draw in NORMS}
        columns = {
            "state_norm": "Norm of the state",
            "transition_norm": "Spectral norm of A",
            "input_norm": "Spectral norm of B",
            "readout_norm": "Spectral norm of C",
            "readout_expansion": "Growth of states by C",
        }
        with plotting.figure(2, 3, width=3.8, height=3.0) as (canvas, grid):
            *axes, last_panel = [panel for line in grid for panel in line]
            for panel, (column, title) in zip(axes, columns.items(), strict=True):
                draw_over_training(panel, results, curves, "telemetry", column)
                panel.set_title(title)
            for index, (name, labels) in enumerate(curves.items()):
                for number, row in enumerate(results.where(**labels)):
                    places, norms = norms_along_the_pass(row)
                    label = name if number == 0 else None
                    last_panel.plot(places, norms, "o-", color=plotting.colour(index), label=label)
            ticks = {
                "emb.": 0,
                "prelude": 1,
                "norm": 2,
                "inject": 3,
                "loop 1": 4,
                "loop 4": 7,
                "loop 8": 11,
            }
            last_panel.set_xticks(list(ticks.values()), labels=list(ticks), fontsize=8, rotation=45)
            last_panel.set(title="Norms along the pass, trained")
            return plotting.save(canvas, path)


def norms_along_the_pass(row: Row) -> tuple[list[int], list[float]]:
    """Norms after the embedding, the prelude, its norm, the injection of the first loop, and each
    loop: their places in the figure, where a model without the norm leaves one out, and values."""
    prelude, first = row.get("prelude_norms") or [], row.get("first_loop_norms") or []
    states = row.get("state_norms") or []
    if not (prelude and first and states):
        return [], []
    has_norm = row["draw"] == "with"
    layers = prelude[1:-1] if has_norm else prelude[1:]
    points = {0: prelude[0], 3: first[0]}
    if layers:
        points[1] = layers[-1]
    if has_norm:
        points[2] = prelude[-1]
    points |= {4 + loop: norm for loop, norm in enumerate(states)}
    return sorted(points), [points[place] for place in sorted(points)]
