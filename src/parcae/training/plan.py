"""What a recipe will cost, before anything is spent: size, work, memory, disk, hours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from parcae.config import ConfigError, require
from parcae.model import flops
from parcae.training.budget import flops_per_step, tokens_per_step, total_steps
from parcae.training.distributed import find_device
from parcae.training.learner import compute_dtype
from parcae.training.memory import Memory, checkpoint_bytes, memory
from parcae.training.peak import PEAKS, peak_flops
from parcae.training.settings import Recipe

UTILISATION = 0.4
DEFAULT_CUDA = "A100"
"""Assumed for a recipe that wants CUDA where there is none to ask."""


@dataclass(frozen=True)
class Plan:
    """A run in numbers. What only the clock will decide is None."""

    parameters: int
    core_parameters: int
    effective_parameters: float
    flops_per_token: float
    """Nominal; see `parcae.model.flops`."""
    tokens_per_step: int
    steps: int | None
    tokens: int | None
    flops: float | None
    tokens_per_parameter: float | None
    device: str
    devices: int
    precision: str
    micro_batch: int
    micro_batches: int
    """Of a step, on each device."""
    memory: Memory
    checkpoint_bytes: int
    device_flops: float | None
    """FLOP/s of one device at best; None where that is not known."""
    utilisation: float
    hours: float | None

    def plain(self) -> dict[str, Any]:
        tree = asdict(self)
        tree["memory"]["total"] = self.memory.total
        return tree


def plan(
    recipe: Recipe,
    devices: int = 1,
    utilisation: float = UTILISATION,
    device_flops: str | float | None = None,
) -> Plan:
    """`device_flops`: FLOP/s of one device, or its name (`a100`, `cpu`); the recipe's if left out.

    A CPU's are measured, which takes a moment.
    """
    require(devices >= 1, "--devices", f"{devices} is not positive", "Use at least 1.")
    within = 0 < utilisation <= 1
    require(within, "--utilisation", f"{utilisation} is out of range", "Use a share such as 0.4.")
    batch = recipe.data.global_batch
    require(
        batch % devices == 0,
        "data.global_batch",
        f"{batch} rows cannot be shared by {devices} devices",
        "Use a multiple of --devices.",
    )
    kind = _kind(recipe, device_flops)
    dtype = compute_dtype(recipe.run.precision, torch.device(kind))
    speed = _speed(device_flops, kind, dtype)
    rows = min(recipe.data.micro_batch or batch // devices, batch // devices)
    micro_batches = -(-(batch // devices) // rows)

    steps, count = total_steps(recipe), flops.parameter_count(recipe.model)
    tokens = None if steps is None else steps * tokens_per_step(recipe)
    work = None if steps is None else steps * flops_per_step(recipe)
    return Plan(
        parameters=count,
        core_parameters=flops.core_parameter_count(recipe.model),
        effective_parameters=flops.effective_parameters(recipe.model),
        flops_per_token=flops.training_flops_per_token(recipe.model),
        tokens_per_step=tokens_per_step(recipe),
        steps=steps,
        tokens=tokens,
        flops=work,
        tokens_per_parameter=None if tokens is None else tokens / count,
        device=kind,
        devices=devices,
        precision=str(dtype).removeprefix("torch."),
        micro_batch=rows,
        micro_batches=micro_batches,
        memory=memory(recipe, dtype, rows, micro_batches, devices),
        checkpoint_bytes=checkpoint_bytes(recipe),
        device_flops=speed,
        utilisation=utilisation,
        hours=_hours(recipe, work, speed, devices * utilisation),
    )


def _hours(recipe: Recipe, work: float | None, speed: float | None, factor: float) -> float | None:
    limit = recipe.budget.clock_minutes
    if recipe.budget.minutes is not None:
        return recipe.budget.minutes / 60
    hours = work / (speed * factor) / 3600 if work and speed else None
    return hours if hours is None or limit is None else min(hours, limit / 60)


def _kind(recipe: Recipe, wanted: str | float | None) -> str:
    """The kind of device that is planned for."""
    if isinstance(wanted, str):
        return "cpu" if wanted.lower() == "cpu" else "cuda"
    device = recipe.run.device
    if wanted is not None and device == "auto":
        return "cuda"
    return find_device("auto").type if device == "auto" else device


def _speed(wanted: str | float | None, kind: str, dtype: torch.dtype) -> float | None:
    if isinstance(wanted, float | int):
        require(0 < wanted < float("inf"), "--device-flops", f"{wanted} is no speed", "Try 312e12.")
        return float(wanted)
    if isinstance(wanted, str) and kind != "cpu":
        speeds = {name.lower(): speed for name, speed in PEAKS.items()}
        if wanted.lower() in speeds:
            return speeds[wanted.lower()]
        known = ", ".join(speeds)
        raise ConfigError(
            f"--device-flops: {wanted!r} is not known. Give FLOP/s, cpu, or one of {known}."
        )
    if kind == "cuda" and not torch.cuda.is_available():
        return PEAKS[DEFAULT_CUDA]
    return peak_flops(torch.device(kind), dtype)
