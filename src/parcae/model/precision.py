"""The model under autocast: products and attention in bfloat16, everything else in float32.

The weights, their gradients, the residual stream, the state of the loop and its injection stay in
float32: a decay close to 1 would round to 1 in bfloat16, and the state would stop contracting.
Autocast alone would cast the weights that loops use in every loop, and sum their gradients in
bfloat16; here they are cast once per forward, and every use adds to a gradient in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, losses, decays and angles: float32, or float64 in a model in float64."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast; None without it."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


class CastWeight(NamedTuple):
    """A weight, and its copy in the dtype of the products; None if that is the weight's own."""

    weight: Tensor
    copy: Tensor | None = None

    def detach(self) -> CastWeight:
        return CastWeight(self.weight.detach(), self.copy)


def cast_weight(weight: Tensor, dtype: torch.dtype | None) -> CastWeight:
    if dtype is None or dtype == weight.dtype:
        return CastWeight(weight)
    return CastWeight(weight, weight.detach().to(dtype))


def linear(x: Tensor, weight: CastWeight) -> Tensor:
    """x W^T, in the dtype of the copy if there is one."""
    if weight.copy is None:
        return F.linear(x, weight.weight)
    return CopyLinear.apply(x.to(weight.copy.dtype), *weight)  # pyright: ignore[reportReturnType]


class CopyLinear(torch.autograd.Function):
    """x C^T for a copy C of the weight W; the gradient is that of W."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, copy: Tensor) -> Tensor:
        return F.linear(x, copy)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, copy = inputs
        ctx.save_for_backward(x, copy)
        ctx.dtype = weight.dtype

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, copy = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ copy
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = (rows.T @ x.reshape(-1, x.shape[-1])).to(ctx.dtype)
        return of_x, of_weight, None


def chunked_cross_entropy(
    x: Tensor, weight: CastWeight, targets: Tensor, ignored: int, chunk: int
) -> Tensor:
    """Mean cross entropy in float32 of logits x W^T, of which `chunk` rows at once are in memory.

    The forward computes the gradients too, so that no logits are computed again.
    """
    if weight.copy is None:
        weight = CastWeight(weight.weight, weight.weight.detach())
    total = ChunkedCrossEntropy.apply(x, *weight, targets, ignored, chunk, torch.is_grad_enabled())
    return total / (targets != ignored).sum()  # pyright: ignore[reportOperatorIssue]


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        copy: Tensor,
        targets: Tensor,
        ignored: int,
        chunk: int,
        with_gradients: bool,
    ) -> Tensor:
        total = torch.zeros((), device=x.device)
        of_x = torch.empty_like(x) if with_gradients else None
        of_weight = torch.zeros_like(weight) if with_gradients else None
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            skipped = targets[part] == ignored
            place = torch.arange(len(skipped), device=x.device), targets[part].clamp_min(0)
            log_p = F.linear(x[part], copy).log_softmax(-1, dtype=torch.float32)
            total -= log_p[place].masked_fill(skipped, 0.0).sum()
            if of_x is None or of_weight is None:
                continue
            p = log_p.exp_()
            p[place] -= 1.0
            of_logits = p.masked_fill_(skipped[:, None], 0.0).to(x.dtype)
            of_x[part] = of_logits @ copy
            of_weight += of_logits.T @ x[part]
        ctx.save_for_backward(of_x, of_weight)
        return total

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        of_x, of_weight = ctx.saved_tensors
        return of_x * gradient, of_weight * gradient, *(None,) * 5
