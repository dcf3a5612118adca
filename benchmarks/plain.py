"""The plain version: the same mathematics, written the way one writes it first.

Every row of a batch loops to the batch's maximum and a mask keeps what counts; B e and the value
embeddings are computed in every loop; the loss sees all logits at once. It shares weights with a
model of ours and no code, so it serves as the yardstick of the benchmarks and as an oracle of the
tests.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.model.depth import Depths


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def turn(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [B, S, H, E] through complex numbers."""
    length, head_dim = x.shape[1], x.shape[3]
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(length).float(), frequency)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(
        3
    )


def attention(attn: Any, z: Tensor, value: Tensor | None, config: Any) -> Tensor:
    rows, length, width = z.shape
    shape = attn.shape
    q, k, v = (
        (z @ w.weight.T).view(rows, length, heads, shape.head_dim)
        for w, heads in (
            (attn.q, shape.heads),
            (attn.k, shape.kv_heads),
            (attn.v, shape.kv_heads),
        )
    )
    if value is not None:
        gate = 2 * torch.sigmoid(z[..., : attn.gate.weight.shape[1]] @ attn.gate.weight.T)
        v = v + gate.unsqueeze(-1) * value.view(v.shape)
    q, k = turn(q, config.rope_theta), turn(k, config.rope_theta)
    if config.qk_norm:
        eps = torch.finfo(torch.float32).eps
        q, k = rms_norm(q, None, eps), rms_norm(k, None, eps)
    k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(rows, length, width) @ attn.out.weight.T


def mlp(part: Any, x: Tensor, config: Any) -> Tensor:
    hidden = x @ part.fc.weight.T
    if config.mlp == "swiglu":
        half = hidden.shape[-1] // 2
        return (F.silu(hidden[..., :half]) * hidden[..., half:]) @ part.proj.weight.T
    return (0.5 * torch.relu(hidden) ** 2) @ part.proj.weight.T


def block(part: Any, x: Tensor, value: Tensor | None, config: Any) -> Tensor:
    def norm(module: Any, x: Tensor) -> Tensor:
        return x if module is None else rms_norm(x, module.weight, config.norm_eps)

    x = norm(part.norm_after_attn, x + attention(part.attn, norm(part.norm_attn, x), value, config))
    return norm(part.norm_after_mlp, x + mlp(part.mlp, norm(part.norm_mlp, x), config))


def inject(injection: Any, h: Tensor, e: Tensor, config: Any) -> Tensor:
    if config.injection == "addition":
        return h + e
    if config.injection == "concatenation":
        return torch.cat([h, e], dim=-1) @ injection.W.T
    rate = F.softplus(injection.dt_bias) * torch.exp(injection.log_A)
    gain = F.softplus(injection.dt_bias)
    if config.discretisation == "zoh":
        gain = (1 - torch.exp(-rate)) / torch.exp(injection.log_A)
    return torch.exp(-rate) * h + gain * (e @ injection.B.T)


def forward(
    model: Any, tokens: Tensor, targets: Tensor | None, depths: Depths, state: Tensor
) -> Tensor:
    """The loss where targets are given, else the logits."""
    config = model.config

    def value(layer: int) -> Tensor | None:
        key = str(layer)
        return (
            F.embedding(tokens, model.value_tables[key].weight)
            if key in model.value_tables
            else None
        )

    e = F.embedding(tokens, model.embed.weight)
    for layer, part in enumerate(model.prelude.blocks):
        e = block(part, e, value(layer), config)
    if config.prelude_norm:
        e = rms_norm(e, model.prelude.norm.weight, config.norm_eps)

    core = model.loop.core

    def one_loop(h: Tensor) -> Tensor:
        x = inject(core.injection, h, e, config)
        for index, part in enumerate(core.blocks):
            x = block(part, x, value(config.prelude_layers + index), config)
        return x

    def masked(h: Tensor, loops: tuple[int, ...]) -> Tensor:
        left = torch.tensor(loops)
        for index in range(max(loops)):
            h = torch.where((index < left)[:, None, None], one_loop(h), h)
        return h

    h = state
    with torch.no_grad():
        h = masked(h, depths.no_grad_loops)
    h = masked(h, depths.gradient_loops)

    x = h if model.coda.readout is None else h @ model.coda.readout.weight.T
    for index, part in enumerate(model.coda.blocks):
        x = block(part, x, value(config.prelude_layers + config.core_layers + index), config)
    x = rms_norm(x, model.coda.norm.weight, config.norm_eps)
    logits = x @ (model.embed if model.head is None else model.head).weight.T
    return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
