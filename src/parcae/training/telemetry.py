"""Measurements of the loop during training, as the paper's appendices plot them.

Measured on a few held-out rows, always the same, from the zero state, at the mean depth of
training, without gradient and outside the compiled code. All norms are means over positions of the
Euclidean norm over channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parcae.model.frame import LanguageModel
from parcae.model.looped import LoopedModel, LoopInputs


@torch.no_grad()
def observe(
    model: LanguageModel, tokens: Tensor, depth: int | None = None
) -> dict[str, Any] | None:
    """Numbers for the log; None for a model without a loop."""
    if not isinstance(model, LoopedModel):
        return None
    depth = depth or model.config.loop.nominal_loops
    return {"depth": depth, **matrices(model), **activations(model, tokens, depth)}


def matrices(model: LoopedModel) -> dict[str, float | None]:
    """Spectral radius of A_bar, and spectral norms: the two differ unless A_bar is diagonal."""
    injection, readout = model.loop.core.injection, model.coda.readout
    return {
        "spectral_radius": _if_finite(injection.transition_matrix(), injection.spectral_radius),
        "transition_norm": spectral_norm(injection.transition_matrix()),
        "input_norm": spectral_norm(injection.input_matrix()),
        "readout_norm": None if readout is None else spectral_norm(readout.weight),
    }


def activations(model: LoopedModel, tokens: Tensor, depth: int) -> dict[str, Any]:
    """Norms block by block through the prelude and the first loop, then loop by loop."""
    config, core = model.config, model.loop.core
    rope = model.rope(tokens.shape[1], config.block.head_dim)
    values = model.values(tokens, 0, config.prelude_layers)
    x = model.embed(tokens)
    prelude_norms = [norm(x)]
    for block, value in zip(model.prelude.blocks, values, strict=True):
        x = block(x, rope, value)
        prelude_norms.append(norm(x))
    e = x
    if model.prelude.norm is not None:
        e = model.prelude.norm(x)
        prelude_norms.append(norm(e))

    rope = model.rope(tokens.shape[1], config.core_block.head_dim)
    values = model.values(tokens, config.prelude_layers, config.core_layers)
    weights = core.blocks.fused_weights()
    inputs = LoopInputs(*core.injection.prepare(e), rope, values, weights)
    h = e.new_zeros(*tokens.shape, config.core_block.width)
    first_loop_norms, state_norms, residuals = [], [], []
    for loop in range(depth):
        before = h
        h = core.injection.mix(h, inputs.transition, inputs.drive)
        seen = [norm(h)]
        for block, value, weight in zip(core.blocks, values, weights, strict=True):
            h = block(h, rope, value, weight)
            seen.append(norm(h))
        if loop == 0:
            first_loop_norms = seen
        state_norms.append(seen[-1])
        residuals.append(norm(h - before))
    readout, size = model.coda.readout, norm(h)
    expansion = None if readout is None or size == 0 else norm(readout(h)) / size
    return {
        "prelude_norms": prelude_norms,
        "first_loop_norms": first_loop_norms,
        "state_norms": state_norms,
        "residuals": residuals,
        "state_norm": state_norms[-1],
        "residual": residuals[-1],
        "readout_expansion": expansion,
    }


def norm(x: Tensor) -> float:
    return x.float().norm(dim=-1).mean().item()


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value."""
    matrix = matrix.float()
    return _if_finite(matrix, lambda: torch.linalg.matrix_norm(matrix, ord=2).item())


def _if_finite(matrix: Tensor, measure: Callable[[], float]) -> float:
    """NaN for a matrix that is not finite, for which linear algebra would raise an error."""
    return measure() if bool(matrix.isfinite().all()) else math.nan
