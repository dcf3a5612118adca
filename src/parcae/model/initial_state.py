"""The initial state h_0 of the loop: zero, drawn, or given.

A drawn state is "like-init": truncated normal with the standard deviation of the initial weights,
cut at 3 standard deviations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parcae.config import ModelConfig
from parcae.model.init_weights import projection_std
from parcae.rng import keyed_generator


def initial_state(
    state: Any,
    config: ModelConfig,
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """h_0 [rows, positions, d_h] of tokens of this shape.

    `state` is a tensor, "zero", "like-init" (drawn from the generator), or None for what the model
    is configured with.
    """
    full = (*shape, config.core_block.width)
    if isinstance(state, Tensor):
        if state.shape != full or not state.is_floating_point():
            raise ValueError(
                f"state: {state.dtype} {[*state.shape]}; floats shaped {[*full]} are needed."
            )
        return state.to(device, dtype)
    kind = state or config.loop.state_init
    if kind == "zero":
        return torch.zeros(full, device=device, dtype=dtype)
    if kind == "like-init":
        return draw_state(full, generator, device, dtype)
    raise ValueError(f'state: {state!r}. Give a tensor, "zero" or "like-init".')


def draw_state(
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """A "like-init" state [..., d_h]: truncated normal, std sqrt(2 / 5 d_h), cut at 3 std."""
    state = torch.empty(*shape, device=generator.device if generator else device)
    _truncated_normal(state.view(-1), projection_std(shape[-1]), generator)
    return state.to(device, dtype)


def draw_state_rows(
    config: ModelConfig,
    seed: int,
    step: int,
    rows: Sequence[int],
    length: int,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Initial states [rows, length, d_h] of the given global rows, the same on any process."""
    shape = (length, config.core_block.width)
    device = torch.device(device)
    if config.loop.state_init == "zero":
        return torch.zeros(len(rows), *shape, device=device)
    states, std = torch.empty(len(rows), *shape, device=device), projection_std(shape[-1])
    for state, row in zip(states.view(len(rows), -1), rows, strict=True):
        _truncated_normal(state, std, keyed_generator(seed, step, row, "state", device))
    return states


def seeded_state(length: int, width: int, seed: int) -> Tensor:
    """A like-init state [length, width] on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return draw_state((length, width), generator, torch.device("cpu"), torch.float32)


def _truncated_normal(values: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill with `nn.init.trunc_normal_` cut at 3 std; on a CPU the same numbers in less time.

    PyTorch checks and replaces over the whole tensor in every round of rejection sampling, though
    only one value in 370 is drawn again. Training calls this for every row of every step.
    """
    if values.device.type != "cpu":
        nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
        return
    limit = np.float32(3 * std)
    fresh = torch.empty_like(values)
    array, fresh_array = values.numpy(), fresh.numpy()
    values.normal_(0.0, std, generator=generator)
    outside = np.flatnonzero(np.abs(array) > limit)
    while outside.size:
        fresh.normal_(0.0, std, generator=generator)
        array[outside] = drawn = fresh_array[outside]
        outside = outside[np.abs(drawn) > limit]
