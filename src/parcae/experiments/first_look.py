"""What looping does, in one picture: a tiny model is trained on bytes, then run at every depth.

The text is Python's own standard library, read from the running interpreter, so nothing is
downloaded. A seventh of it is held out.
"""

from __future__ import annotations

import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from parcae import console, draw
from parcae.config import LoopConfig, ModelConfig
from parcae.cpu import keep_freed_memory
from parcae.files import write_json
from parcae.model import create
from parcae.model.depth import sample_rows
from parcae.model.flops import parameter_count
from parcae.model.frame import LanguageModel
from parcae.model.init import draw_state_rows
from parcae.model.injection import ConcatenationInjection
from parcae.model.looped import LoopedModel

DEPTHS = tuple(range(1, 17))
ROWS, LENGTH = 16, 96
LEARNED_RADIUS = 1.1
"""Divergent runs of recurrent depth models learn a spectral radius above 1; this is one."""
CONFIG = ModelConfig(
    vocab_size=256,
    context_length=LENGTH,
    width=96,
    heads=3,
    prelude_layers=1,
    core_layers=1,
    coda_layers=1,
    loop=LoopConfig(mean_loops=6),
)


@dataclass(frozen=True)
class Profile:
    """Means over held-out positions at each depth."""

    loss: list[float]
    residual: list[float]
    state_norm: list[float]


def first_look(out: Path, steps: int, seed: int) -> Path:
    """Train, measure, draw; returns the picture's path."""
    keep_freed_memory()
    training, held_out = byte_corpus()
    model = create(CONFIG, seed=seed)
    console.out.print(
        f"A looped model of {parameter_count(CONFIG):,} parameters reads Python's standard library "
        f"byte by byte ({len(training) / 1e6:.1f} MB)."
    )
    start = time.perf_counter()
    losses = train(model, training, steps, seed)
    seconds = time.perf_counter() - start
    profile = measure(model, held_out)
    growth = {name: linear_growth(name) for name in ("diagonal", "addition", "concatenation")}
    picture = _draw(profile, growth, out / "looping.png")
    result = {"seed": seed, "steps": steps, "depths": DEPTHS, "loss": profile.loss}
    write_json(out / "result.json", {**result, "residual": profile.residual, "growth": growth})
    _explain(losses, profile, seconds, picture)
    return picture


def byte_corpus() -> tuple[Tensor, Tensor]:
    """(training, held out) bytes; whole files stay on one side."""
    folder = Path(sysconfig.get_path("stdlib"))
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for index, file in enumerate(sorted(folder.glob("*.py"))):
        sides[index % 7 == 3].append(file.read_bytes())
    training, held_out = (
        torch.frombuffer(bytearray(b"".join(s)), dtype=torch.uint8) for s in sides
    )
    return training, held_out


def train(model: LanguageModel, data: Tensor, steps: int, seed: int) -> list[float]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    rows = range(ROWS)
    losses = []
    for step in console.track(range(steps), "training", total=steps):
        progress = step / steps
        optimiser.param_groups[0]["lr"] = 4e-3 * min(1.0, 2 * (1 - progress), (step + 1) / 20)
        tokens, targets = _batch(data, generator)
        depths = sample_rows(CONFIG.loop, seed, step, rows)
        state = draw_state_rows(CONFIG, seed, step, rows, LENGTH)
        loss = model(tokens, targets=targets, depths=depths, state=state).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def measure(model: LanguageModel, data: Tensor, batches: int = 8) -> Profile:
    """Loss, residual and state norm after every loop, from one pass at the deepest."""
    generator = torch.Generator().manual_seed(0)
    totals = torch.zeros(3, len(DEPTHS))
    for _ in range(batches):
        tokens, targets = _batch(data, generator)
        seen = model(tokens, depths=DEPTHS[-1], state="zero", trajectory=True).trajectory
        flat = targets.flatten()
        losses = [torch.nn.functional.cross_entropy(x.flatten(0, 1), flat) for x in seen.logits]
        norms = seen.states[1:].norm(dim=-1).mean(dim=(1, 2))
        totals += torch.stack([torch.stack(losses), seen.residuals.mean(dim=(1, 2)), norms])
    return Profile(*(totals / batches).tolist())


@torch.no_grad()
def linear_growth(injection: str, loops: int = 64) -> list[float]:
    """||h_t|| of the loop's linear part alone, for weights a training run could well reach."""
    width = 64
    model = cast(LoopedModel, create(CONFIG, width=width, heads=2, injection=injection, seed=1))
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


def _batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=generator)
    rows = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def _draw(profile: Profile, growth: dict[str, list[float]], path: Path) -> Path:
    with draw.figure(1, 3, width=4.4, height=3.5) as (canvas, (left, middle, right)):
        left.plot(DEPTHS, profile.loss, marker="o")
        mean = CONFIG.loop.mean_loops
        left.axvline(mean, color="#999999", linestyle=":", linewidth=1.2)
        left.text(
            mean + 0.2, max(profile.loss), f"mean in training: {mean:g}", va="top", fontsize=8.5
        )
        left.set(
            title="Held-out loss falls, then saturates", xlabel="loops T", ylabel="nats per byte"
        )

        middle.plot(DEPTHS, profile.residual, marker="o", label=r"$\|h_T - h_{T-1}\|$")
        middle.plot(DEPTHS, profile.state_norm, marker="o", label=r"$\|h_T\|$")
        middle.set(title="The state settles", xlabel="loops T", yscale="log")
        middle.legend()

        labels = {
            "diagonal": "diagonal (Parcae): stable",
            "addition": "addition: marginally stable",
            "concatenation": f"concatenation, ρ = {LEARNED_RADIUS}: unstable",
        }
        for name, norms in growth.items():
            right.plot(range(1, len(norms) + 1), norms, label=labels[name])
        right.set(title=r"Linear part alone: $\|h_T\|$", xlabel="loops T", yscale="log")
        right.legend(fontsize=8.5, loc="upper left")
        right.set_ylim(top=30 * max(map(max, growth.values())))
        return draw.save(canvas, path)


def _explain(losses: list[float], profile: Profile, seconds: float, picture: Path) -> None:
    chosen = [t for t in (1, 2, 4, 8, 16) if t in DEPTHS]
    rows = [
        (
            t,
            f"{profile.loss[t - 1]:.3f}",
            f"{profile.residual[t - 1]:.3g}",
            f"{profile.state_norm[t - 1]:.3g}",
        )
        for t in chosen
    ]
    columns = ("loops T", "held-out loss", "‖h_T − h_{T−1}‖", "‖h_T‖")
    console.out.print(console.table("The same weights at several depths", columns, rows))
    console.out.print(
        f"Trained in {seconds:.0f} s, loss {losses[0]:.2f} -> {losses[-1]:.2f}.\n"
        f"Picture: {picture}\n"
        "Look at the left panel first: depth is chosen when the model runs, not when it is built."
    )
