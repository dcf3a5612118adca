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
SOLVED = 0.95
"""Share of right answers from which on the figure says that walks of a length are solved."""
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
def linear_growth(injection: str, loops: int = 128) -> list[float]:
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
        small = {"fontsize": 8.5}
        lengths = list(next(iter(accuracy.values())))
        solved: dict[int, list[str]] = {}
        for colour, length in zip(plotting.shades(len(lengths)), lengths, strict=True):
            shares = [100 * by_length[length] for by_length in accuracy.values()]
            left.plot(accuracy.keys(), shares, marker="o", color=colour)
            first = next((t for t in accuracy if accuracy[t][length] >= SOLVED), None)
            if first is None:
                left.text(max(accuracy) + 0.3, shares[-1], f"{length}", va="center", **small)
            else:
                solved.setdefault(first, []).append(f"{length}")
        for first, names in solved.items():
            left.text(first, 103, ", ".join(names), ha="center", **small)
        left.text(max(accuracy), 103, "steps of the walk", ha="right", **small)
        left.set(title="More loops, longer walks", xlabel="loops T", ylabel="right answers, %")
        left.set(ylim=(0, 112), yticks=range(0, 101, 20), xticks=DEPTHS[1::2])

        change = [100 * (loss / profile.loss[0] - 1) for loss in profile.loss]
        middle.plot(DEPTHS, change, marker="o")
        middle.axvline(mean_loops, color=plotting.LIGHT_GREY, linestyle=":", linewidth=1.2)
        label = f"mean in training: {mean_loops:g}"
        middle.text(mean_loops + 0.2, max(change), label, va="top", **small)
        first, last = (f"{loss:.2f} nats per token" for loss in (profile.loss[0], profile.loss[-1]))
        middle.text(DEPTHS[0] + 0.4, change[0], first, va="center", **small)
        middle.text(
            DEPTHS[-1], change[-1] - 0.03 * change[-1], last, ha="right", va="bottom", **small
        )
        trend = "falls, then saturates" if profile.improves else "does not fall: train longer"
        middle.set(title=f"Loss on text {trend}", xlabel="loops T", xticks=DEPTHS[1::2])
        middle.set_ylabel("change of the loss, % of one loop's")
        middle.yaxis.set_major_formatter("{x:g}")

        labels = {
            "diagonal": "diagonal (Parcae)",
            "addition": "addition",
            "concatenation": f"concatenation, ρ = {LEARNED_RADIUS}",
        }
        for colour, (name, norms) in zip(plotting.PALETTE, growth.items(), strict=False):
            right.plot(range(1, len(norms) + 1), norms, color=colour)
            at = len(norms) * 3 // 4 if name == "concatenation" else len(norms)
            note = {"color": colour, "ha": "right", "va": "bottom", **small}
            offset = {"xytext": (-4, 4), "textcoords": "offset points"}
            right.annotate(labels[name], (at, norms[at - 1]), **offset, **note)
        right.set(
            title="Only Parcae's linear part is bounded",
            xlabel="loops T",
            ylabel=r"$\|h_T\|$ of the linear part",
            yscale="log",
        )
        return plotting.save(canvas, path)
