"""The layers of a model in the form used for decoding.

With one token, small operations take mostly launch time. So what training keeps apart is folded
together once:

    [q; k; v; gate] is one matrix, multiplied by the scale of the norm before it
    fc and proj contain the norm's scale and the 0.5 of 0.5 relu(x)^2
    norms divide by length only: x / sqrt(|x|^2 + D eps), and the sqrt(D) is in the next matrix
    adding the residual is part of the matrix product before it

Layers work on the concatenated tokens of all sequences [N, D], without padding. Only attention
needs to know which token belongs to which sequence; see `Batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import BlockShape
from parcae.infer.batch import Batch
from parcae.infer.quantise import Matrix
from parcae.model.blocks import QK_NORM_EPS, Block, rope_table

Prepare = Callable[[Tensor], Matrix]
"""Converts a weight [out, in] to the format in which it is stored."""


class UnitNorm:
    """x / sqrt(|x|^2 + D eps): RMS norm without sqrt(D), which `fold` puts in a matrix."""

    def __init__(self, width: int, eps: float, device: torch.device) -> None:
        self.width = width
        self.floor = torch.tensor(math.sqrt(width * eps), device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)

    def fold(self, weight: Tensor, scale: Tensor) -> Tensor:
        """W such that W times the output of this norm is `weight` times (RMS-normed x * scale)."""
        return weight.detach().float() * (scale.detach().float() * math.sqrt(self.width))


@dataclass(frozen=True, eq=False)
class ScaledNorm:
    """RMS norm whose scale is applied to its output."""

    unit: UnitNorm
    scale: Tensor

    @classmethod
    def of(cls, scale: Tensor, eps: float) -> ScaledNorm:
        scale = scale.detach().float()
        return cls(UnitNorm(len(scale), eps, scale.device), scale * math.sqrt(len(scale)))

    def __call__(self, x: Tensor) -> Tensor:
        return self.unit(x) * self.scale


@dataclass(frozen=True, eq=False)
class Layer:
    """One residual block."""

    shape: BlockShape
    norm: UnitNorm
    qk_norm: UnitNorm | None
    gated_mlp: bool
    inner: Matrix
    """q, k, v and, where there are value embeddings, a gate for each key-value head."""
    out: Matrix
    fc: Matrix
    proj: Matrix
    after: tuple[ScaledNorm, ScaledNorm] | None
    """The norms after attention and MLP, in models that normalise the residual."""

    @classmethod
    def of(cls, block: Block, prepare: Prepare) -> Layer:
        attention, mlp, shape = block.attn, block.mlp, block.attn.shape
        device, eps = attention.q.weight.device, block.norm_attn.eps or 0.0
        norm = UnitNorm(shape.width, eps, device)
        rows = [attention.q.weight, attention.k.weight, attention.v.weight]
        if attention.gate is not None:
            gate = attention.gate.weight
            # An even number of outputs, so that each row can be viewed as complex numbers.
            rows.append(F.pad(gate, (0, shape.width - gate.shape[1], 0, len(gate) % 2)))
        after = None
        if block.norm_after_attn is not None and block.norm_after_mlp is not None:
            after = (
                ScaledNorm.of(block.norm_after_attn.weight, eps),
                ScaledNorm.of(block.norm_after_mlp.weight, eps),
            )
        return cls(
            shape=shape,
            norm=norm,
            qk_norm=UnitNorm(shape.head_dim, QK_NORM_EPS, device) if attention.qk_norm else None,
            gated_mlp=mlp.gated,
            inner=prepare(norm.fold(torch.cat(rows), block.norm_attn.weight)),
            out=prepare(attention.out.weight),
            fc=prepare(norm.fold(mlp.fc.weight, block.norm_mlp.weight)),
            proj=prepare(mlp.proj.weight if mlp.gated else mlp.proj.weight * 0.5),
            after=after,
        )

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.inner, self.out, self.fc, self.proj

    def map(self, function: Callable[[Matrix], Matrix]) -> Layer:
        """The same layer with `function` applied to its matrices."""
        names = ("inner", "out", "fc", "proj")
        return replace(self, **dict(zip(names, map(function, self.matrices), strict=True)))

    def __call__(
        self, x_ND: Tensor, phases: Tensor, value: Tensor | None, kv: Tensor, batch: Batch
    ) -> Tensor:
        """`kv` is the layer's part of the cache; keys and values are written, then read."""
        x_ND = self.out.add_to(x_ND, self._attend(self.norm(x_ND), phases, value, kv, batch))
        if self.after is not None:
            x_ND = self.after[0](x_ND)
        x_ND = self.proj.add_to(x_ND, self._hidden(self.norm(x_ND)))
        if self.after is not None:
            x_ND = self.after[1](x_ND)
        return x_ND

    def _attend(
        self, z_ND: Tensor, phases: Tensor, value: Tensor | None, kv: Tensor, batch: Batch
    ) -> Tensor:
        H, K, E = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        projected = self.inner(z_ND)
        qk = rotate(projected[:, : (H + K) * E], phases)
        v = projected[:, (H + K) * E : (H + 2 * K) * E].unflatten(1, (K, E))
        if value is not None:
            gate = projected[:, (H + 2 * K) * E : (H + 2 * K) * E + K].sigmoid()
            v = torch.addcmul(v, gate[..., None], value, value=2.0)
        scale = None
        if self.qk_norm is not None:
            qk, scale = self.qk_norm(qk), math.sqrt(E)
        batch.write_kv(kv, qk[:, H:], v)
        return batch.attend(qk[:, :H], kv, scale).flatten(1)

    def _hidden(self, z_ND: Tensor) -> Tensor:
        hidden = self.fc(z_ND)
        if self.gated_mlp:
            gate, up = hidden.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        return hidden.relu_().square_()


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """Rotary embedding: the pairs (2i, 2i + 1) of concatenated heads [N, HE], as complex numbers,
    times the phases [N, 1, E/2] of their positions. Returns [N, H, E]."""
    pairs = x.view(torch.complex64).unflatten(1, (-1, phases.shape[-1]))
    return (pairs * phases).view(torch.float32)


def phase_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos + i sin of the angle of every position [S, 1, E/2]."""
    return torch.complex(*rope_table(length, head_dim, theta, device))


class CachedStack:
    """Layers run in sequence, each with its part of the cache."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    def map(self, function: Callable[[Matrix], Matrix]) -> CachedStack:
        return CachedStack([layer.map(function) for layer in self.layers])

    def __call__(
        self,
        x: Tensor,
        phases: Tensor,
        values: Sequence[Tensor | None],
        kv: Sequence[Tensor],
        batch: Batch,
    ) -> Tensor:
        for layer, value, layer_kv in zip(self.layers, values, kv, strict=True):
            x = layer(x, phases, value, layer_kv, batch)
        return x
