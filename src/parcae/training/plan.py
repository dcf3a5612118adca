"""The cost of a recipe before training: parameters, FLOPs, memory, disk, hours.

plan = parcae.plan("recipes/140m.toml", devices=8, device_flops="h100")
plan.hours, plan.memory.total, plan.table()
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from parcae.config import ConfigError, require
from parcae.files import FileError
from parcae.model import flops
from parcae.schema import require_range
from parcae.training.corpora import check_planned_tokenizer
from parcae.training.data_use import SourceUse, planned_use
from parcae.training.distributed import compute_dtype, training_device
from parcae.training.memory_estimate import (
    Memory,
    checkpoint_bytes,
    choose_micro_batch,
    estimate_memory,
)
from parcae.training.schedule import flops_per_step, tokens_per_step, total_steps
from parcae.training.settings import Recipe, resolve_recipe

PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
}
"""Dense bfloat16 FLOP/s from the data sheets; the first name contained in the device's counts."""
DEFAULT_GPU = "A100"
"""Assumed for a recipe on CUDA where no CUDA device is present."""
UTILISATION = 0.4
MATRIX_SIZE = 1024
MEASURING_SECONDS = 0.3


@dataclass(frozen=True)
class Plan:
    """The size, work, memory and time of a run. What a budget in minutes leaves open is None."""

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
    micro_batch_reason: str | None
    """Why a recipe that does not set it has this one."""
    micro_batches: int
    """Micro-batches of a step on each device."""
    last_micro_batch: int
    """Rows of the last of them."""
    memory: Memory
    checkpoint_bytes: int
    device_flops: float | None
    """Peak FLOP/s of one device; None where it is unknown."""
    utilisation: float
    seconds_per_step: float | None
    hours: float | None
    data: list[SourceUse] | None
    """What is used of each source; None where one cannot be read."""
    data_problem: str | None
    """Why `data` is None."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, as `parcae plan --json` prints them."""
        tree = asdict(self)
        tree["memory"]["total"] = self.memory.total
        return tree

    def table(self) -> list[dict[str, Any]]:
        """One row per quantity: {"quantity": ..., "value": ...}."""
        values = self.to_dict()
        memory = {f"memory_{name}": size for name, size in values.pop("memory").items()}
        sources: list[dict[str, Any]] = values.pop("data") or []
        data = {
            f"data_{number}_{name}": value
            for number, use in enumerate(sources)
            for name, value in use.items()
        }
        rows = {**values, **memory, **data}
        return [{"quantity": key, "value": value} for key, value in rows.items()]


def plan(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    devices: int = 1,
    utilisation: float = UTILISATION,
    device_flops: str | float | None = None,
    **overrides: Any,
) -> Plan:
    """The cost of a recipe, which is given as for `parcae.train`.

    `device_flops` is the peak of one device in FLOP/s, or its name (`a100`, `cpu`); by default that
    of the recipe's device. A CPU's is measured, which takes 0.3 s. `utilisation` is the share of
    the peak that training is expected to reach.
    """
    recipe = resolve_recipe(recipe, overrides)
    require_range("devices", devices, at_least=1)
    require_range("utilisation", utilisation, above=0, at_most=1)
    batch = recipe.data.global_batch
    require(
        batch % devices == 0,
        "data.global_batch",
        f"{batch} rows cannot be split evenly over {devices} devices",
        "Use a multiple of the number of devices.",
    )
    kind = _device_kind(recipe, device_flops)
    dtype = compute_dtype(recipe, torch.device(kind))
    speed = _device_speed(device_flops, kind, dtype)
    rows, reason = recipe.data.micro_batch, None
    if rows is None:
        rows, reason = choose_micro_batch(recipe, torch.device(kind), devices, devices)
    rows_of_device = batch // devices
    rows = min(rows, rows_of_device)
    micro_batches = -(-rows_of_device // rows)

    steps, count = total_steps(recipe), flops.parameter_count(recipe.model)
    tokens = None if steps is None else steps * tokens_per_step(recipe)
    work = None if steps is None else steps * flops_per_step(recipe)
    data, problem = _data_use(recipe)
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
        micro_batch_reason=reason,
        micro_batches=micro_batches,
        last_micro_batch=rows_of_device - (micro_batches - 1) * rows,
        memory=estimate_memory(recipe, dtype, rows, micro_batches, devices, kind),
        checkpoint_bytes=checkpoint_bytes(recipe),
        device_flops=speed,
        utilisation=utilisation,
        seconds_per_step=step_seconds(recipe, speed, devices, utilisation),
        hours=_hours(recipe, work, speed, devices * utilisation),
        data=data,
        data_problem=problem,
    )


def _data_use(recipe: Recipe) -> tuple[list[SourceUse] | None, str | None]:
    """What is used of the sources, or why that is unknown: a plan needs no data."""
    try:
        check_planned_tokenizer(recipe)
        return planned_use(recipe), None
    except (FileError, ConfigError) as error:
        return None, str(error)


def peak_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float | None:
    """Peak FLOP/s of a device: a GPU's from its data sheet, a CPU's from matrix products.

    None where it is unknown. A CPU that is busy with something else shows less than its peak.
    """
    if device.type == "cpu":
        return _measured_flops(dtype)
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def step_seconds(
    recipe: Recipe, device_flops: float | None, devices: int, utilisation: float = UTILISATION
) -> float | None:
    """Expected seconds of an optimiser step; None where the speed of the device is unknown."""
    if device_flops is None:
        return None
    return flops_per_step(recipe) / (device_flops * devices * utilisation)


def _measured_flops(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of many products of square matrices."""
    generator, shape = torch.Generator().manual_seed(0), (MATRIX_SIZE, MATRIX_SIZE)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    shortest, end = float("inf"), time.perf_counter() + MEASURING_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        shortest = min(shortest, time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / shortest


def _hours(
    recipe: Recipe, work: float | None, speed: float | None, effective_devices: float
) -> float | None:
    limit = recipe.budget.clock_minutes
    if recipe.budget.minutes is not None:
        return recipe.budget.minutes / 60
    hours = work / (speed * effective_devices) / 3600 if work and speed else None
    return hours if hours is None or limit is None else min(hours, limit / 60)


def _device_kind(recipe: Recipe, device_flops: str | float | None) -> str:
    """The type of device that is planned for."""
    if isinstance(device_flops, str):
        return "cpu" if device_flops.lower() == "cpu" else "cuda"
    device = recipe.run.device
    if device_flops is not None and device == "auto":
        return "cuda"
    return training_device("auto").type if device == "auto" else device


def _device_speed(given: str | float | None, kind: str, dtype: torch.dtype) -> float | None:
    if isinstance(given, float | int):
        in_range = 0 < given < float("inf")
        require(in_range, "device_flops", f"{given} FLOP/s is out of range", "Try 312e12.")
        return float(given)
    if isinstance(given, str) and kind != "cpu":
        speeds = {name.lower(): speed for name, speed in PEAK_FLOPS.items()}
        if given.lower() in speeds:
            return speeds[given.lower()]
        raise ConfigError(
            f"device_flops: {given!r} is not a known device. Give FLOP/s, cpu, or one of "
            f"{', '.join(speeds)}."
        )
    if kind == "cuda" and not torch.cuda.is_available():
        return PEAK_FLOPS[DEFAULT_GPU]
    return peak_flops(torch.device(kind), dtype)
