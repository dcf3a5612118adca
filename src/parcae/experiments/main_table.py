"""The paper's main table at three million parameters, with the gain of Parcae taken apart.

The lead of a looped model over a Transformer of the same parameters is what its loops gain minus
its handicap after one loop:

    L_transformer - L(8)  =  (L(1) - L(8))  -  (L(1) - L_transformer)
    lead                     gain              handicap
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parcae import plotting
from parcae.experiments.experiment import (
    Experiment,
    Results,
    Run,
    Table,
    format_losses,
    loss_at,
)
from parcae.experiments.figures import draw_loss_by_loops
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, always, describe, differences, positive
from parcae.model import flops
from parcae.presets import preset

LOOPS = 8
TEST_LOOPS = tuple(range(1, 25))
SMALL_GAIN = 0.16
"""Nats from T = 1 to 8 of the model of 0.2 million parameters with 48 tokens per parameter."""
PAPER = {"lead": 0.120, "gain": 0.332, "handicap": 0.213}
"""Of the paper's 140M models."""
TRANSFORMER, PARCAE = "Transformer", "Parcae"
UNCONSTRAINED = {"injection": "concatenation", "readout": False, "prelude_norm": False}
MODELS: dict[str, dict[str, Any]] = {
    TRANSFORMER: {"preset": "transformer-3m"},
    PARCAE: {"preset": "parcae-3m"},
    "RDM, pre-norm": {"preset": "parcae-3m", **UNCONSTRAINED},
    "RDM, residual norm": {"preset": "parcae-3m", **UNCONSTRAINED, "norm": "residual"},
}
SEEDS = {TRANSFORMER: 3, PARCAE: 3}
"""Of each model, one if it is not named."""
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Of AdamW and Muon; the Transformer's best after `RATE_STEPS` is used for all models."""
RATE: float | None = None
"""Chosen by `main-table-rate`; the table joins the catalogue when it is known."""
RATE_STEPS, STEPS = 900, 3662
"""Of 16,384 tokens: 15 and 60 million."""

SETTINGS: dict[str, Any] = {
    "model": {"vocab_size": 4096, "context_length": 256, "width": 128, "heads": 2},
    "data": {"sources": ["text:all"], "global_batch": 64, "micro_batch": 64},
    "schedule": {"momentum_warmup_steps": 300},
    "run": {
        "precision": "bfloat16",
        "compile": True,
        "validation_loops": list(TEST_LOOPS),
        "validation_rows": 800,
    },
}


class MainTableRate(Experiment):
    name = "main-table-rate"
    title = "The learning rate of the main table"
    in_paper = "the table of the Transformer setup"
    paper = "8e-3 for AdamW and Muon, 140M and 370M."

    def runs(self, scale: Scale) -> Iterator[Run]:
        steps = 2 if scale.name == "toy" else RATE_STEPS
        for rate in RATES:
            recipe = _recipe(scale, TRANSFORMER, rate, steps, seed=0)
            yield Run(recipe, {"rate": rate, "seed": 0})

    def claims(self, results: Results) -> list[Claim]:
        losses = {row["rate"]: loss_at(row, 1) for row in results.rows}
        best = min(losses, key=losses.__getitem__, default=RATES[0])
        return [
            Claim(
                "The Transformer's best learning rate lies inside the grid",
                always([best in RATES[1:-1]] if losses else []),
                "; ".join(f"{rate:g}: {loss:.3f}" for rate, loss in losses.items()),
            )
        ]

    def table(self, results: Results) -> Table:
        rows = [(f"{rate:g}", format_losses(results.loss(1, rate=rate))) for rate in RATES]
        return ("learning rate", "loss"), rows

    def draw(self, results: Results, path: Path) -> Path:
        with plotting.figure() as (canvas, panel):
            pairs = sorted((row["rate"], loss_at(row, 1)) for row in results.rows)
            panel.plot(*zip(*pairs, strict=True), marker="o") if pairs else None
            panel.set(title="Transformer, 15 million tokens", xscale="log")
            panel.set(xlabel="learning rate of AdamW and Muon", ylabel="held-out loss")
            return plotting.save(canvas, path)


class MainTable(Experiment):
    name = "main-table"
    title = "The main table at three million parameters"
    in_paper = "the table of the Transformer setup"
    paper = (
        "140M parameters: Parcae leads by 0.120 nats; its loops gain 0.332 from T = 1 to 8, and at "
        "T = 1 it is 0.213 behind the Transformer."
    )

    def runs(self, scale: Scale) -> Iterator[Run]:
        if scale.name == "paper" or RATE is None:  # `transformer-comparison` has the paper's runs
            return
        steps = 3 if scale.name == "toy" else STEPS
        for seed in range(max(SEEDS.values())):
            for model in MODELS:
                if seed < SEEDS.get(model, 1):
                    recipe = _recipe(scale, model, RATE, steps, seed)
                    yield Run(recipe, {"model": model, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        lead, gain, handicap = (parts(results)[name] for name in ("lead", "gain", "handicap"))
        return [
            Claim(
                "At 3 million parameters and 18 tokens per parameter Parcae leads a Transformer "
                "that has at least as many parameters",
                positive(lead),
                f"lead {describe(lead)}, the paper's 140M: {PAPER['lead']:.3f} nats",
            ),
            Claim(
                f"Loops gain more than the {SMALL_GAIN} nats of 0.2 million parameters",
                positive(value - SMALL_GAIN for value in gain),
                f"gain from T = 1 to {LOOPS} {describe(gain)}, handicap at T = 1 "
                f"{describe(handicap)} nats",
            ),
        ]

    def table(self, results: Results) -> Table:
        rows = []
        for model in MODELS:
            found = results.where(model=model)
            if found:
                looped = model != TRANSFORMER
                losses = [
                    format_losses(results.loss(loops, model=model)) if looped or loops == 1 else ""
                    for loops in (1, 2, 4, 8, 16, 24)
                ]
                rows.append((model, f"{found[0]['parameters']:,}", *losses))
        return ("model", "parameters", *(f"T = {t}" for t in (1, 2, 4, 8, 16, 24))), rows

    def draw(self, results: Results, path: Path) -> Path:
        curves = {model: {"model": model} for model in MODELS}
        with plotting.figure(1, 2, width=5.0) as (canvas, (left, right)):
            draw_loss_by_loops(left, results, curves, TEST_LOOPS, mean=LOOPS)
            left.set_title("Held-out loss against loops")
            ours = {name: sum(v) / len(v) for name, v in parts(results).items() if v}
            for index, (name, values) in enumerate({"here": ours, "paper, 140M": PAPER}.items()):
                heights = [values.get(part, 0.0) for part in PAPER]
                places = [place + 0.4 * index - 0.2 for place in range(len(PAPER))]
                right.bar(places, heights, width=0.36, color=plotting.colour(index), label=name)
            right.set_xticks(range(len(PAPER)), labels=list(PAPER))
            right.set(title="Lead = gain from loops - handicap", ylabel="nats per token")
            right.legend(fontsize=8.5)
            return plotting.save(canvas, path)


def parts(results: Results) -> Mapping[str, list[float]]:
    """Lead, gain and handicap by seed."""

    def losses(model: str, loops: int) -> dict[int, float]:
        return results.loss(loops, model=model)

    transformer, one, many = losses(TRANSFORMER, 1), losses(PARCAE, 1), losses(PARCAE, LOOPS)
    return {
        "lead": differences(transformer, many),
        "gain": differences(one, many),
        "handicap": differences(one, transformer),
    }


def widened() -> int:
    """The width of the Transformer's MLP with which it has at least Parcae's parameters."""
    shape = SETTINGS["model"]
    parcae, plain = (preset(MODELS[name]["preset"], shape) for name in (PARCAE, TRANSFORMER))
    width = plain.block.mlp_width
    while flops.parameter_count(replace(plain, mlp_width=width)) < flops.parameter_count(parcae):
        width += 2
    return width


def _recipe(scale: Scale, model: str, rate: float, steps: int, seed: int) -> Any:
    optimiser = {"lr": rate, "muon_lr": rate}
    if scale.name == "paper":
        return scale.recipe(scale.text("transformer", optimiser=optimiser), seed)
    settings = {} if scale.name == "toy" else SETTINGS
    shape = {**settings.get("model", {}), **MODELS[model]}
    if model == TRANSFORMER and scale.name != "toy":
        shape["mlp_width"] = widened()
    tree = scale.text(
        "parcae" if model != TRANSFORMER else "transformer",
        **{**settings, "model": shape},
        optimiser=optimiser,
        budget={"steps": steps},
    )
    return scale.recipe(tree, seed)
