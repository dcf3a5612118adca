"""Appendix "Hyperparameters": the learning rates of AdamW and Muon that suit the Transformer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from parcae import plotting
from parcae.experiments.experiment import Experiment, Results, Run, Table, format_losses, loss_at
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, always

ADAMW = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
MUON = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
SHORT = {"micro": {"steps": 400}, "toy": {"steps": 3}}
CLOSE = 0.02
"""Nats above the best of the grid that the rates of all other experiments may be."""
CHOSEN = (8e-3, 8e-3)


class LrSweep(Experiment):
    name = "lr-sweep"
    title = "Learning rates of the Transformer"
    in_paper = "the appendix on hyperparameters"
    paper = "The sweep chose 8e-3 for AdamW and for Muon at 140M and 370M, 6e-3 at 770M and 1.3B."

    def runs(self, scale: Scale) -> Iterator[Run]:
        budget = SHORT.get(scale.name, {})
        for seed, lr, muon in itertools.product(scale.few_seeds, ADAMW, MUON):
            tree = scale.text("transformer", optimiser={"lr": lr, "muon_lr": muon}, budget=budget)
            yield Run(scale.recipe(tree, seed), {"lr": lr, "muon_lr": muon, "seed": seed})

    def claims(self, results: Results) -> list[Claim]:
        statement = f"The paper's rates are within {CLOSE} nats of the best of the grid"
        behind, best = [], []
        for seed in results.values("seed"):
            losses = {(r["lr"], r["muon_lr"]): loss_at(r, 1) for r in results.where(seed=seed)}
            if len(losses) == len(ADAMW) * len(MUON):
                best.append(min(losses, key=losses.__getitem__))
                behind.append(losses[CHOSEN] - losses[best[-1]])
        evidence = "; ".join(
            f"best at AdamW {lr:g}, Muon {muon:g}, {gap:.3f} below the paper's rates"
            for (lr, muon), gap in zip(best, behind, strict=True)
        )
        return [Claim(statement, always(gap <= CLOSE for gap in behind), evidence)]

    def table(self, results: Results) -> Table:
        rows = [
            (f"AdamW {lr:g}", *(format_losses(results.loss(1, lr=lr, muon_lr=m)) for m in MUON))
            for lr in ADAMW
        ]
        return ("", *(f"Muon {muon:g}" for muon in MUON)), rows

    def draw(self, results: Results, path: Path) -> Path:
        grid = np.full((len(ADAMW), len(MUON)), np.nan)
        for (y, lr), (x, muon) in itertools.product(enumerate(ADAMW), enumerate(MUON)):
            losses = results.loss(1, lr=lr, muon_lr=muon)
            if losses:
                grid[y, x] = np.mean(list(losses.values()))
        with plotting.figure(width=5.0) as (canvas, panel):
            image = panel.imshow(grid, cmap="viridis", origin="lower")
            for (y, x), value in np.ndenumerate(grid):
                if np.isfinite(value):
                    red, green, blue, _ = image.to_rgba(value)
                    light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                    colour = "black" if light else "white"
                    panel.text(x, y, f"{value:.3f}", ha="center", va="center", color=colour)
            panel.set_xticks(range(len(MUON)), labels=[f"{rate:g}" for rate in MUON])
            panel.set_yticks(range(len(ADAMW)), labels=[f"{rate:g}" for rate in ADAMW])
            panel.set(
                title="Held-out loss",
                xlabel="learning rate of Muon",
                ylabel="learning rate of AdamW",
            )
            panel.grid(visible=False)
            canvas.colorbar(image, ax=panel)
            return plotting.save(canvas, path)
