"""Causal attention: PyTorch's fused operator, or ours where that is slow."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 128
"""Queries whose scores are computed together; later keys are skipped for all of them."""
SCORES = 1 << 20
"""Scores in memory at once, which is about what a core's cache holds."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [B, H, S, E] of queries [B, H, S, E] over keys and values [B, K, S, E].

    PyTorch's fused attention; for bfloat16 on CPUs, whose fused backward is slower than that for
    float32, by products of bfloat16 matrices.
    """
    groups = q.shape[1] // k.shape[1]
    if q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return bfloat16_attention(*(x.flatten(0, 1) for x in (q, k, v))).view_as(q)


@torch.library.custom_op("parcae::bfloat16_attention", mutates_args=())
def bfloat16_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of every matrix in [N, S, E]."""
    y = torch.empty_like(q)
    for part, queries, keys, mask in _blocks(q):
        p = _probabilities(q[part, queries], k[part, keys], mask)
        torch.bmm(p, v[part, keys], out=y[part, queries])
    return y


@bfloat16_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("parcae::bfloat16_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the probabilities are computed again."""
    scale = q.shape[-1] ** -0.5
    of_q, of_k, of_v = (
        torch.empty_like(q),
        *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v)),
    )
    for part, queries, keys, mask in _blocks(q):
        g, q_block = gradient[part, queries], q[part, queries]
        p = _probabilities(q_block, k[part, keys], mask)
        mean = (g * y[part, queries]).sum(-1, keepdim=True)
        of_scores = torch.baddbmm(mean, g, v[part, keys].mT, beta=-1).mul_(p)
        torch.baddbmm(
            q_block, of_scores, k[part, keys], beta=0, alpha=scale, out=of_q[part, queries]
        )
        of_k[part, keys] += of_scores.mT @ q_block
        of_v[part, keys] += p.mT @ g
    return of_q, of_k.mul_(scale).to(k.dtype), of_v.to(v.dtype)


@_backward.register_fake
def _(gradient, q, k, v, y):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


bfloat16_attention.register_autograd(
    lambda ctx, gradient: _backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save
)


def _blocks(q: Tensor):
    """For each block of scores: its matrices, its queries, their keys, and what is added to the
    scores: -inf where a key comes after the query."""
    N, S, _ = q.shape
    for start in range(0, S, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, S)
        mask = q.new_full((end - start, end), float("-inf")).triu(start + 1)
        together = max(1, SCORES // mask.numel())
        for first in range(0, N, together):
            yield slice(first, first + together), slice(start, end), slice(end), mask


def _probabilities(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.baddbmm(mask, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1)
