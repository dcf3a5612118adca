"""Measurements of the loop during training, as the paper's appendices plot them.

Measured on a few held-out rows, always the same, from the zero state, at the mean depth of
training, without gradient and outside the compiled code. All norms are means over positions of the
Euclidean norm over channels. Spectra of large matrices are estimated from a hundred products with
vectors; benchmarks/telemetry.py measures what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parcae.model.base import LanguageModel
from parcae.model.injection import Injection
from parcae.model.looped import LoopedModel, LoopInputs

EXACT_WIDTH = 128
"""Matrices up to this width are decomposed in full."""
LANCZOS_STEPS = 64
ARNOLDI_STEPS = 128
SQUARINGS = 4
INVARIANT = 1e-5
"""Share of a vector's norm below which what is left of it is rounding, in float32."""


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
    """Spectral radius of A_bar, and spectral norms: the two differ unless A_bar is diagonal.

    Those of an A_bar that depends on the input are not defined, and left out."""
    injection, readout = model.loop.core.injection, model.coda.readout
    transition = injection.transition_matrix()
    has_closed_form = type(injection).spectral_radius is not Injection.spectral_radius
    radius = (lambda _: injection.spectral_radius()) if has_closed_form else _largest_eigenvalue
    of_transition = (
        {}
        if transition is None
        else {
            "spectral_radius": _if_finite(transition, radius),
            "transition_norm": spectral_norm(transition),
        }
    )
    return {
        **of_transition,
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
    weights = core.blocks.weights()
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
    """The largest singular value; see `_largest_singular_value`."""
    return _if_finite(matrix, _largest_singular_value)


def spectral_radius(matrix: Tensor) -> float:
    """The largest |eigenvalue|; see `_largest_eigenvalue`."""
    return _if_finite(matrix, _largest_eigenvalue)


def _if_finite(matrix: Tensor, measure: Callable[[Tensor], float]) -> float:
    """NaN for a matrix that is not finite, for which linear algebra would raise an error."""
    matrix = matrix.float()
    if not bool(matrix.isfinite().all()):
        return math.nan
    return measure(matrix)


def _largest_singular_value(matrix: Tensor) -> float:
    """Exact for diagonal and small matrices, else by Lanczos steps on A^T A: from below, to 1e-5.

    All singular values, of which one is wanted, would take some hundred times as long.
    """
    if _is_diagonal(matrix):
        return matrix.diagonal().abs().max().item()
    if min(matrix.shape) <= EXACT_WIDTH:
        return torch.linalg.matrix_norm(matrix, ord=2).item()
    scale = matrix.abs().max().item()  # squares of squares of entries must not overflow
    matrix = matrix / scale
    squared = _projection(lambda x: matrix.T @ (matrix @ x), _start(matrix), LANCZOS_STEPS)
    return scale * math.sqrt(torch.linalg.eigvalsh((squared + squared.T) / 2)[-1].item())


def _largest_eigenvalue(matrix: Tensor) -> float:
    """Exact for diagonal and small matrices, else by Arnoldi steps on A^16, to 1e-3.

    The eigenvalues of a power differ more in size, so that few steps find the largest, and its root
    divides the error by 16. Powers are scaled; the logarithm of the scale is kept.
    """
    if _is_diagonal(matrix):
        return matrix.diagonal().abs().max().item()
    if len(matrix) <= EXACT_WIDTH:
        return torch.linalg.eigvals(matrix.cpu().double()).abs().max().item()
    power, log_scale = matrix, 0.0
    for _ in range(SQUARINGS):
        size = power.abs().max().item()
        if size == 0:  # nilpotent
            return 0.0
        power, log_scale = power / size, 2 * (log_scale + math.log(size))
        power = power @ power
    projected = _projection(lambda x: power @ x, _start(matrix), ARNOLDI_STEPS)
    largest = torch.linalg.eigvals(projected).abs().max().item()
    return math.exp((math.log(largest) + log_scale) / 2**SQUARINGS) if largest > 0 else 0.0


def _projection(apply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """Q^T M Q [steps, steps], in float64 on the CPU, for an orthonormal basis Q of start, M start,
    M^2 start, ... (Arnoldi's iteration; Lanczos's where M is symmetric).

    Where the space that is spanned is invariant, the rest of the basis is zero.
    """
    basis = start.new_zeros(steps + 1, len(start))
    projected = start.new_zeros(steps + 1, steps)
    basis[0] = start / start.norm()
    for step in range(steps):
        x = apply(basis[step])
        size, so_far = x.norm(), basis[: step + 1]
        for _ in range(2):  # twice, against rounding
            along = so_far @ x
            x = x - along @ so_far
            projected[: step + 1, step] += along
        rest = x.norm()
        is_new = rest > INVARIANT * size
        projected[step + 1, step] = torch.where(is_new, rest, 0)
        basis[step + 1] = torch.where(is_new, x / rest, 0)
    return projected[:steps].cpu().double()


def _start(matrix: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(matrix.shape[1], generator=generator).to(matrix.device)


def _is_diagonal(matrix: Tensor) -> bool:
    return bool((matrix.count_nonzero() == matrix.diagonal().count_nonzero()).item())
