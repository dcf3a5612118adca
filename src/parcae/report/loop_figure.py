"""The figure of the demo: what 1 to 16 loops do to accuracy on a task, loss and the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from parcae import plotting
from parcae.config import ModelConfig
from parcae.evaluation.loss import totals_by_loops
from parcae.model import create
from parcae.model.injection import ConcatenationInjection
from parcae.model.looped import LoopedModel

DEPTHS = tuple(range(1, 17))
LEARNED_RADIUS = 1.1
"""Spectral radius of the unstable example; recurrent depth models that diverge learn one > 1."""


@dataclass(frozen=True)
class Profile:
    """Means over held-out positions after each number of loops."""

    loss: list[float]
    residual: list[float]
    state_norm: list[float]

    @property
    def improves(self) -> bool:
        """Whether more loops lower the loss; at the start of training they do not."""
        return min(self.loss[1:]) < self.loss[0]


@torch.no_grad()
def measure(model: LoopedModel, batches: Sequence[tuple[Tensor, Tensor]]) -> Profile:
    """Losses of all batches, and norms of the first one, after each number of loops."""
    losses = totals_by_loops(model, batches, DEPTHS).finish()
    tokens = batches[0][0]
    residuals, norms, previous = [], [], None
    for _, h in zip(DEPTHS, model.iterate(tokens, state="zero"), strict=False):
        change = h if previous is None else h - previous
        residuals.append(change.norm(dim=-1).mean().item())
        norms.append(h.norm(dim=-1).mean().item())
        previous = h
    return Profile([losses[t].loss for t in DEPTHS], residuals, norms)


@torch.no_grad()
def linear_growth(injection: str, loops: int = 64) -> list[float]:
    """||h_t|| of the linear part of the loop alone, for weights that training could reach."""
    width = 64
    config = ModelConfig(vocab_size=256, width=width, heads=2, context_length=64)
    model = cast(LoopedModel, create(config, injection=injection, seed=1))
    part = model.loop.core.injection
    if isinstance(part, ConcatenationInjection):
        part.W.mul_(LEARNED_RADIUS / part.spectral_radius())
    e = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(2))
    transition, drive = part.prepare(e)
    h, norms = torch.zeros_like(drive), []
    for _ in range(loops):
        h = part.mix(h, transition, drive)
        norms.append(h.norm().item())
    return norms


def draw_figure(
    profile: Profile, mean_loops: float, accuracy: Mapping[int, Mapping[int, float]], path: Path
) -> Path:
    """Draw accuracy on walks, loss on text and the growth of the linear part.

    `accuracy`: by number of loops, then by steps of a walk.
    """
    growth = {name: linear_growth(name) for name in ("diagonal", "addition", "concatenation")}
    with plotting.figure(1, 3, width=4.4, height=3.5) as (canvas, (left, middle, right)):
        lengths = list(next(iter(accuracy.values())))
        for colour, length in zip(plotting.shades(len(lengths)), lengths, strict=True):
            shares = [100 * by_length[length] for by_length in accuracy.values()]
            left.plot(accuracy.keys(), shares, marker="o", color=colour, label=f"{length}")
        left.set(title="More loops, longer walks", xlabel="loops T", ylabel="right answers, %")
        left.set_ylim(0, 104)
        left.legend(title="steps", loc="lower right", ncols=2)

        middle.plot(DEPTHS, profile.loss, marker="o")
        middle.axvline(mean_loops, color=plotting.LIGHT_GREY, linestyle=":", linewidth=1.2)
        label = f"mean in training: {mean_loops:g}"
        middle.text(mean_loops + 0.2, max(profile.loss), label, va="top", fontsize=8.5)
        trend = "falls, then saturates" if profile.improves else "does not fall: train longer"
        middle.set(title=f"Loss on text {trend}", xlabel="loops T", ylabel="nats per token")

        labels = {
            "diagonal": "diagonal (Parcae): stable",
            "addition": "addition: marginally stable",
            "concatenation": f"concatenation, ρ = {LEARNED_RADIUS}: unstable",
        }
        for name, norms in growth.items():
            right.plot(range(1, len(norms) + 1), norms, label=labels[name])
        right.set(
            title="The linear part alone", xlabel="loops T", ylabel=r"$\|h_T\|$", yscale="log"
        )
        right.legend(fontsize=8.5, loc="upper left")
        right.set_ylim(top=30 * max(map(max, growth.values())))
        return plotting.save(canvas, path)
