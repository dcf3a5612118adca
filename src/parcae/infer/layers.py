"""The layers of a model as decoding runs them.

Between two large products a token is a few hundred numbers, and every small operation on them costs
as much as starting it. So what training keeps apart is folded together once:

    [q; k; v; gate] is one matrix, with the scale of the norm before it multiplied in
    fc and proj take up the norm's scale and the 0.5 of 0.5 relu(x)^2
    norms divide by length only: x / sqrt(|x|^2 + D eps), and the sqrt(D) is in the matrix after it
    the sum with the residual is part of the product before it

Layers work on tokens of all sequences laid end to end, [N, D]: no padding anywhere. Who belongs to
whom matters in attention only, and `Work` says it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import BlockShape
from parcae.infer.quantise import Matrix
from parcae.infer.work import Work
from parcae.model.blocks import QK_NORM_EPS, Block, rope_table

Prepare = Callable[[Tensor], Matrix]
"""What a weight [out, in] is turned into."""


class UnitNorm:
    """x / sqrt(|x|^2 + D eps): RMS norm up to the factor sqrt(D), which `fold` puts elsewhere."""

    def __init__(self, width: int, eps: float, device: torch.device) -> None:
        self.width = width
        self.floor = torch.tensor(math.sqrt(width * eps), device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)

    def fold(self, weight: Tensor, scale: Tensor) -> Tensor:
        """W such that its product with what comes out here is W_0 (RMS-normed x * scale)."""
        return weight.detach().float() * (scale.detach().float() * math.sqrt(self.width))


@dataclass(frozen=True, eq=False)
class ScaledNorm:
    """RMS norm whose result is used as it is."""

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
    """The norms after attention and MLP, in models that norm the residual."""

    @classmethod
    def of(cls, block: Block, prepare: Prepare) -> Layer:
        attention, mlp, shape = block.attn, block.mlp, block.attn.shape
        device, eps = attention.q.weight.device, block.norm_attn.eps or 0.0
        norm = UnitNorm(shape.width, eps, device)
        rows = [attention.q.weight, attention.k.weight, attention.v.weight]
        if attention.gate is not None:
            gate = attention.gate.weight
            # An even number of outputs, so that rows are complex numbers wherever they begin.
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
        """The same with other matrices."""
        names = ("inner", "out", "fc", "proj")
        made = map(function, self.matrices)
        return replace(self, **dict(zip(names, made, strict=True)))

    def __call__(
        self, x_ND: Tensor, phases: Tensor, value: Tensor | None, kept: Tensor, work: Work
    ) -> Tensor:
        """`kept` is the layer's part of the cache; the tokens at hand are written, then read."""
        x_ND = self.out.add_to(x_ND, self._attend(self.norm(x_ND), phases, value, kept, work))
        if self.after is not None:
            x_ND = self.after[0](x_ND)
        x_ND = self.proj.add_to(x_ND, self._hidden(self.norm(x_ND)))
        if self.after is not None:
            x_ND = self.after[1](x_ND)
        return x_ND

    def _attend(
        self, z_ND: Tensor, phases: Tensor, value: Tensor | None, kept: Tensor, work: Work
    ) -> Tensor:
        H, K, E = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        made = self.inner(z_ND)
        qk = rotate(made[:, : (H + K) * E], phases)
        v = made[:, (H + K) * E : (H + 2 * K) * E].unflatten(1, (K, E))
        if value is not None:
            gate = made[:, (H + 2 * K) * E : (H + 2 * K) * E + K].sigmoid()
            v = torch.addcmul(v, gate[..., None], value, value=2.0)
        scale = None
        if self.qk_norm is not None:
            qk, scale = self.qk_norm(qk), math.sqrt(E)
        work.write(kept, qk[:, H:], v)
        return work.attend(qk[:, :H], kept, scale).flatten(1)

    def _hidden(self, z_ND: Tensor) -> Tensor:
        hidden = self.fc(z_ND)
        if self.gated_mlp:
            gate, up = hidden.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        return hidden.relu_().square_()


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of heads laid end to end [N, HE], as complex numbers, by the
    phases [N, 1, E/2] of their positions: [N, H, E]."""
    pairs = x.view(torch.complex64).unflatten(1, (-1, phases.shape[-1]))
    return (pairs * phases).view(torch.float32)


def phase_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos + i sin of the angle of every position [S, 1, E/2]."""
    return torch.complex(*rope_table(length, head_dim, theta, device))


class Stack:
    """Layers one after the other, each with its part of the cache."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    def map(self, function: Callable[[Matrix], Matrix]) -> Stack:
        return Stack([layer.map(function) for layer in self.layers])

    def __call__(
        self,
        x: Tensor,
        phases: Tensor,
        values: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        work: Work,
    ) -> Tensor:
        for layer, value, part in zip(self.layers, values, kept, strict=True):
            x = layer(x, phases, value, part, work)
        return x
