"""Table "Stability results trained on the Transformer setup": from an RDM to Parcae in steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses
from parcae.experiments.figures import draw_loss_by_loops
from parcae.experiments.scales import TEST_LOOPS, Scale
from parcae.experiments.verdicts import Claim, describe, differences, lower, together

LOOPS = (1, 4, 8)
PER_BATCH = {"draw_per": "micro-batch"}
STEPS: dict[str, dict[str, Any]] = {
    "RDM": {
        "injection": "concatenation",
        "readout": False,
        "prelude_norm": False,
        "loop": PER_BATCH,
    },
    "+ constrained A": {"prelude_norm": False, "loop": PER_BATCH},
    "+ per-sequence sampling": {"prelude_norm": False},
    "+ prelude norm": {},
}
"""What each step changes of Parcae's [model]; the last is Parcae."""


class AblationLadder(Experiment):
    name = "ablation-ladder"
    title = "From an RDM to Parcae, step by step"
    in_paper = "the table of stability results"
    paper = (
        "Loss at T = 1, 4, 8: the RDM diverges; + constrained A 8.99, 3.15, 2.97; + per-sequence "
        "sampling 3.38, 3.01, 2.98; + prelude norm 3.28, 2.97, 2.95."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        for seed, (step, model) in itertools.product(scale.seeds, STEPS.items()):
            recipe = scale.recipe(scale.text(model=model), seed)
            yield Run(recipe, {"step": step, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        def loss(step: str, loops: int) -> dict[int, float]:
            return results.loss(loops, step=step)

        rdm, constrained, sampled, parcae = STEPS

        def gain(before: str, after: str, loops: int) -> str:
            values = differences(loss(before, loops), loss(after, loops))
            return f"T = {loops}: {describe(values)} nats"

        return [
            Claim(
                "Constraining A lowers the loss at T = 8, or keeps the run from diverging",
                lower(loss(constrained, 8), loss(rdm, 8)),
                gain(rdm, constrained, 8),
            ),
            Claim(
                "Sampling depths per sequence lowers the loss at T = 1 by more than 0.1 nats",
                lower(loss(sampled, 1), loss(constrained, 1), margin=0.1),
                f"{gain(constrained, sampled, 1)}; {gain(constrained, sampled, 8)}",
            ),
            Claim(
                "The prelude norm lowers the loss at T = 1, 4 and 8",
                together(lower(loss(parcae, t), loss(sampled, t)) for t in LOOPS),
                "; ".join(gain(sampled, parcae, t) for t in LOOPS),
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = [
            (step, *(format_losses(results.loss(loops, step=step)) for loops in (*LOOPS, 16)))
            for step in STEPS
        ]
        return ("configuration", "T = 1", "T = 4", "T = 8", "T = 16"), rows

    def draw(self, results: Results, path: Path) -> Path:
        curves = {step: {"step": step} for step in STEPS}
        with plotting.figure(width=6.0) as (canvas, panel):
            draw_loss_by_loops(panel, results, curves, TEST_LOOPS, mean=8)
            panel.set_title("Each step of the ladder")
            return plotting.save(canvas, path)
