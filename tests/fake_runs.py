"""Run folders as a trainer would leave them, made up but plausible."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from parcae.presets import PRESETS
from parcae.recipe import merge, to_dict, write_toml

DEPTHS = (1, 2, 4, 8, 16)


def recipe(preset: str = "parcae-1m", **changes: Any) -> dict[str, Any]:
    tree = {
        "model": to_dict(PRESETS[preset]),
        "data": {"sources": ["builtin"], "global_batch": 16},
        "optimiser": {"kind": "muon-adamw", "lr": 0.008, "muon_lr": 0.008},
        "schedule": {"cooldown_fraction": 0.5},
        "budget": {"steps": 500},
        "run": {"seed": 0},
    }
    return merge(tree, changes)


def train_line(step: int, steps: int, noise: random.Random, floor: float = 3.0) -> dict[str, Any]:
    progress = step / steps
    loss = floor + 5.3 * math.exp(-7 * progress) - 0.4 * progress + noise.gauss(0, 0.09)
    rate = 0.008 * min(1.0, 2 * (1 - progress) + 1e-3)
    return {
        "kind": "train",
        "step": step,
        "loss": loss,
        "gradient_norm": 0.3 + 2 * math.exp(-20 * progress) + abs(noise.gauss(0, 0.1)),
        "lr": {"adamw": rate, "muon": rate},
        "tokens": step * 8192,
        "flops": step * 1.2e10,
        "executed_flops": step * 1.1e10,
        "mean_depth": noise.gauss(8, 0.7),
        "max_depth": round(noise.gauss(14, 1.5)),
        "tokens_per_second": noise.gauss(5400, 250),
        "peak_fraction": None,
        "seconds": step * 0.63,
        "skipped": False,
    }


def telemetry_line(step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    progress = step / steps
    top = 8 + 14 * progress
    norms = [top * (1 - 0.6 * 0.55**t) * noise.gauss(1, 0.01) for t in range(1, 9)]
    residuals = [top * 0.4 * 0.55**t for t in range(1, 9)]
    return {
        "kind": "telemetry",
        "step": step,
        "depth": 8,
        "residual": residuals[-1] * noise.gauss(1, 0.1),
        "state_norm": norms[-1],
        "state_norms": norms,
        "residuals": residuals,
        "spectral_radius": 0.35 + 0.35 * progress + noise.gauss(0, 0.01),
        "transition_norm": 0.37 + 0.35 * progress,
        "input_norm": 1 + progress,
        "readout_norm": 1 + 0.7 * progress,
        "readout_expansion": 0.6 + 0.1 * progress,
        "prelude_norms": [3 + progress, 5 + 2 * progress, 8.0],
        "first_loop_norms": [9.0, 11 + progress],
    }


def validation_line(step: int, steps: int, looped: bool = True) -> dict[str, Any]:
    losses = {str(t): depth_loss(t, step / steps) for t in (DEPTHS if looped else (1,))}
    bits = {t: loss / 2.3 for t, loss in losses.items()}
    return {"kind": "validation", "step": step, "losses": losses, "bits_per_byte": bits}


def depth_loss(depth: int, progress: float) -> float:
    return 2.9 + 5 * math.exp(-6 * progress) + 0.9 * progress * math.exp(-depth / 2.5)


def result(steps: int, looped: bool = True, **changes: Any) -> dict[str, Any]:
    depths = DEPTHS if looped else (1,)
    validation = {
        str(t): {
            "loss": round(depth_loss(t, 1.0), 5),
            "perplexity": round(math.exp(depth_loss(t, 1.0)), 4),
            "bits_per_byte": round(depth_loss(t, 1.0) / 2.3, 5),
        }
        for t in depths
    }
    return {
        "status": "finished",
        "parameters": 942848,
        "steps": steps,
        "tokens": steps * 8192,
        "flops": steps * 1.2e10,
        "executed_flops": steps * 1.1e10,
        "seconds": steps * 0.63,
        "train_loss": 2.97531,
        "validation": validation,
        "device": "cpu",
        "processes": 1,
        "torch": "2.13.0",
        "seed": 0,
        "skipped_steps": 1,
        "spikes": 2,
        "model": {"width": 64},
        "samples": [
            {
                "depth": t,
                "prompt": p,
                "text": f"main(x{t}):\n    if x < {t} & y > 0:\n  <b>bold</b>",
            }
            for p in ("def ", "<script>alert('T')</script> & ")
            for t in (1, 8)
        ],
        "diagnosis": None,
        **changes,
    }


def write_run(
    folder: Path,
    lines: list[dict[str, Any]],
    tree: dict[str, Any] | None = None,
    outcome: dict[str, Any] | None = None,
    tail: str = "",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(write_toml(recipe() if tree is None else tree))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    if outcome is not None:
        (folder / "result.json").write_text(json.dumps(outcome))
    return folder


def looped_run(folder: Path, steps: int = 60, seed: int = 0, floor: float = 3.0, **changes) -> Path:
    noise = random.Random(seed)
    lines: list[dict[str, Any]] = []
    every = max(1, steps // 10)
    for step in range(1, steps + 1):
        lines.append(train_line(step, steps, noise, floor))
        if step % every == 0:
            lines.append(telemetry_line(step, steps, noise))
        if step % (2 * every) == 0:
            lines.append(validation_line(step, steps))
        if step == steps // 3:
            lines[-1] |= {"loss": None, "gradient_norm": None, "skipped": True}
            what = {"kind": "event", "step": step}
            lines.append({**what, "what": "skipped", "message": "the gradient was <not> finite"})
            lines.append({**what, "what": "spike", "message": "loss 9.1 is 6 deviations above"})
    return write_run(folder, lines, recipe(**changes), result(steps, seed=seed))


def transformer_run(folder: Path, steps: int = 40) -> Path:
    noise = random.Random(1)
    lines: list[dict[str, Any]] = [train_line(s, steps, noise, 3.2) for s in range(1, steps + 1)]
    lines.append(validation_line(steps, steps, looped=False))
    outcome = result(steps, looped=False, samples=[])
    return write_run(folder, lines, recipe("transformer-1m"), outcome)
