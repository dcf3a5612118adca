"""Building blocks of all architectures: rotary embeddings, attention, MLP, block, stack of blocks.

Shapes: B rows, S positions, D width, H heads, K key-value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import BlockShape, ModelConfig
from parcae.model.attention import attention
from parcae.model.precision import CastWeight, autocast_dtype, cast_weight, linear, wide

GATE_CHANNELS = 32
"""A value embedding's gate reads this many channels of the block's input."""
QK_NORM_EPS = torch.finfo(torch.float32).eps


class Rope(NamedTuple):
    """Cosines and sines [S, 1, E/2] by which the pairs (2i, 2i+1) of a head are rotated."""

    cos: Tensor
    sin: Tensor


def rope_table(
    length: int,
    head_dim: int,
    theta: float,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Rope:
    exact = wide(dtype)
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device).to(exact) / head_dim)
    angles = torch.outer(torch.arange(length, device=device).to(exact), frequencies)[:, None]
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x_BSHE: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair of channels by an angle proportional to the position.

    Computed in the table's dtype. The first halves of all pairs come first, then the second halves:
    contiguous, so it is fast.
    """
    first, second = x_BSHE.to(rope.cos.dtype).chunk(2, dim=-1)
    turned = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    return torch.cat(turned, dim=-1).to(x_BSHE.dtype)


class BlockWeights(NamedTuple):
    """What the products of a block use, prepared once for all its loops; None: call the layer."""

    qkv: CastWeight
    out: CastWeight | None = None
    gate: CastWeight | None = None
    fc: CastWeight | None = None
    proj: CastWeight | None = None

    def detach(self) -> BlockWeights:
        return BlockWeights(*(None if x is None else x.detach() for x in self))  # pyright: ignore


def cast_layer(layer: nn.Linear | None, dtype: torch.dtype | None) -> CastWeight | None:
    """A layer's weight, with a copy in `dtype` unless the layer is an adapter that must be called.

    None without a `dtype`.
    """
    if layer is None or dtype is None:
        return None
    return cast_weight(layer.weight, dtype) if _is_plain_linear(layer) else CastWeight(layer.weight)


def layer_output(layer: nn.Linear, x: Tensor, weight: CastWeight | None) -> Tensor:
    if weight is None:
        return layer(x)
    return layer(x.to(weight.weight.dtype)) if weight.copy is None else linear(x, weight)


class Attention(nn.Module):
    """Causal self-attention; on some layers the values receive a gated token embedding."""

    def __init__(self, config: ModelConfig, shape: BlockShape, gated: bool) -> None:
        super().__init__()
        self.shape = shape
        self.qk_norm = config.qk_norm
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate: nn.Linear | None = None
        if gated:
            self.gate = nn.Linear(min(GATE_CHANNELS, shape.width), shape.kv_heads, bias=False)

    def fused_weight(self) -> Tensor:
        """[q; k; v], so that one large product does the work of three.

        The rows of q and k are put in the order of `rotate`. Scores are sums over channels, so
        they do not notice, and the stored matrices keep the order (2i, 2i+1) of checkpoints.
        """
        qk = torch.cat((self.q.weight, self.k.weight))
        pairs = qk.unflatten(0, (-1, self.shape.head_dim // 2, 2))
        return torch.cat((pairs.transpose(1, 2).reshape_as(qk), self.v.weight))

    def project(
        self,
        z_BSD: Tensor,
        rope: Rope,
        value: Tensor | None,
        weights: BlockWeights | None = None,
    ) -> tuple[Tensor, ...]:
        """Queries [B, H, S, E], keys and values [B, K, S, E]."""
        weights = BlockWeights(CastWeight(self.fused_weight())) if weights is None else weights
        H, K, E = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        qkv = linear(z_BSD, weights.qkv).unflatten(-1, (-1, E))
        qk, v = qkv.split((H + K, K), dim=2)
        if self.gate is not None and value is not None:
            gate = layer_output(self.gate, z_BSD[..., : self.gate.in_features], weights.gate)
            v = v + (2.0 * torch.sigmoid(gate))[..., None] * value.unflatten(-1, (-1, E))
        qk = rotate(qk, rope)
        if self.qk_norm:
            qk = F.rms_norm(qk, (E,), eps=QK_NORM_EPS)
        q, k = qk.split((H, K), dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self,
        z_BSD: Tensor,
        rope: Rope,
        value: Tensor | None = None,
        weights: BlockWeights | None = None,
    ) -> Tensor:
        y = attention(*self.project(z_BSD, rope, value, weights)).transpose(1, 2).flatten(2)
        return layer_output(self.out, y, weights and weights.out)


class SquaredReluLinear(torch.autograd.Function):
    """Linear layer on 0.5 relu(x)^2. Only x is kept for the backward, which squares it again: the
    square would be a sixth of all that a block keeps. Without a `copy` of the weight in the dtype
    of x, it is cast where it is used, so that no copy is kept under autocast either."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, copy: Tensor | None = None) -> Tensor:
        copy = weight.to(x.dtype) if copy is None else copy
        return F.linear(x.relu().square().mul_(0.5), copy)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, copy = ctx.saved_tensors
        rectified = x.relu()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ (weight.to(x.dtype) if copy is None else copy)).mul_(rectified)
        if ctx.needs_input_grad[1]:
            # Not as in the forward: the compiler would recognise the product, and keep that one.
            squared = (0.5 * rectified).mul_(rectified)
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = (rows.T @ squared.reshape(-1, squared.shape[-1])).to(weight.dtype)
        return of_x, of_weight, None


class MLP(nn.Module):
    """`relu2`: proj(0.5 relu(fc x)^2). `swiglu`: proj(silu(gate) * up), fc holds [gate; up]."""

    def __init__(self, config: ModelConfig, shape: BlockShape) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        rows = shape.mlp_width * (2 if self.gated else 1)
        self.fc = nn.Linear(shape.width, rows, bias=False)
        self.proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(
        self, x: Tensor, fc: CastWeight | None = None, proj: CastWeight | None = None
    ) -> Tensor:
        hidden = layer_output(self.fc, x, fc)
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            return layer_output(self.proj, F.silu(gate) * up, proj)
        if not _is_plain_linear(self.proj):
            return layer_output(self.proj, 0.5 * hidden.relu().square(), proj)
        weight, copy = CastWeight(self.proj.weight) if proj is None else proj
        return SquaredReluLinear.apply(hidden, weight, copy)  # pyright: ignore[reportReturnType]


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether nothing is lost if only its weight is used: no adapter, no quantisation, no hook."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    hooks += (module._backward_hooks, module._backward_pre_hooks)
    replaced = "forward" in vars(module)  # by accelerate, which loads offloaded weights there
    return type(module) is nn.Linear and not replaced and not any(hooks)


class Block(nn.Module):
    """A residual block. `pre`: x + f(N(x)). `residual`: N(x + f(N(x))), the RDM's four norms."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        shape = config.block_of_layer(layer)
        self.norm_attn = nn.RMSNorm(shape.width, eps=config.norm_eps)
        self.attn = Attention(config, shape, gated=config.has_value_embedding(layer))
        self.norm_mlp = nn.RMSNorm(shape.width, eps=config.norm_eps)
        self.mlp = MLP(config, shape)
        self.norm_after_attn: nn.RMSNorm | None = None
        self.norm_after_mlp: nn.RMSNorm | None = None
        if config.norm == "residual":
            self.norm_after_attn = nn.RMSNorm(shape.width, eps=config.norm_eps)
            self.norm_after_mlp = nn.RMSNorm(shape.width, eps=config.norm_eps)

    def weights(self) -> BlockWeights:
        """Weights for `forward`, which callers that loop compute once."""
        attn, mlp = self.attn, self.mlp
        fused = attn.fused_weight()
        dtype = autocast_dtype(fused.device)
        layers = (cast_layer(x, dtype) for x in (attn.out, attn.gate, mlp.fc, mlp.proj))
        return BlockWeights(cast_weight(fused, dtype), *layers)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        value: Tensor | None = None,
        weights: BlockWeights | None = None,
    ) -> Tensor:
        weights = self.weights() if weights is None else weights
        x = x + self.attn(self.norm_attn(x), rope, value, weights)
        if self.norm_after_attn is not None:
            x = self.norm_after_attn(x)
        x = x + self.mlp(self.norm_mlp(x), weights.fc, weights.proj)
        if self.norm_after_mlp is not None:
            x = self.norm_after_mlp(x)
        return x


Values = Sequence[Tensor | None]
"""For each layer of a stack the value embeddings of the tokens [B, S, K*E], or None."""


class Stack(nn.ModuleList):
    """Blocks in sequence; layers are numbered over prelude, core and coda, without loops."""

    def __init__(self, config: ModelConfig, first_layer: int, layers: int) -> None:
        super().__init__(Block(config, first_layer + i) for i in range(layers))

    def weights(self) -> list[BlockWeights]:
        return [block.weights() for block in self]  # pyright: ignore

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        values: Values,
        weights: Sequence[BlockWeights] | None = None,
    ) -> Tensor:
        weights = self.weights() if weights is None else weights
        for block, value, of_block in zip(self, values, weights, strict=True):
            x = block(x, rope, value, of_block)
        return x
