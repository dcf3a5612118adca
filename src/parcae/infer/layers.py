"""A model's weights as decoding wants them, and the layers over them.

What training keeps apart is folded together once, so that a token costs few and large products:

    [q; k; v; gate] in one matrix, the norm's scale multiplied into its columns
    fc with the norm's scale, proj with the 0.5 of 0.5 relu(x)^2
    the final norm's scale in the head

Layers work on tokens of all sequences laid end to end, [N, D]: no padding anywhere. Who belongs to
whom matters in attention only, and `Work` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import BlockShape
from parcae.infer.work import Work
from parcae.model.blocks import QK_NORM_EPS, Block

Product = Callable[[Tensor], Tensor]
"""x [N, in] -> x W^T [N, out]."""
Prepare = Callable[[Tensor], Product]
"""What a weight [out, in] is turned into: float32 as it is, or something smaller."""


def normalise(x: Tensor, eps: float) -> Tensor:
    """RMS norm without a scale."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """W such that x W^T equals (x * scale) W_0^T."""
    return weight.detach().float() * scale.detach().float()


@dataclass(frozen=True, eq=False)
class Layer:
    """One residual block."""

    shape: BlockShape
    eps: float
    qk_norm: bool
    gated_mlp: bool
    inner: Product
    """q, k, v and, where there are value embeddings, a gate for each key-value head."""
    out: Product
    fc: Product
    proj: Product
    after: tuple[Tensor, Tensor] | None
    """The scales of the norms after attention and MLP, in models that norm the residual."""

    @classmethod
    def of(cls, block: Block, prepare: Prepare) -> Layer:
        attention, mlp = block.attn, block.mlp
        rows = [attention.q.weight, attention.k.weight, attention.v.weight]
        if attention.gate is not None:
            gate = attention.gate.weight
            missing = attention.shape.width - gate.shape[1]
            # An even number of outputs, so that rows are complex numbers wherever they begin.
            rows.append(F.pad(gate, (0, missing, 0, len(gate) % 2)))
        inner = scaled(torch.cat(rows), block.norm_attn.weight)
        fc = scaled(mlp.fc.weight, block.norm_mlp.weight)
        proj = mlp.proj.weight.detach().float() * (1.0 if mlp.gated else 0.5)
        after = None
        if block.norm_after_attn is not None and block.norm_after_mlp is not None:
            after = (
                block.norm_after_attn.weight.detach().float(),
                block.norm_after_mlp.weight.detach().float(),
            )
        return cls(
            shape=attention.shape,
            eps=block.norm_attn.eps or 0.0,
            qk_norm=attention.qk_norm,
            gated_mlp=mlp.gated,
            inner=prepare(inner),
            out=prepare(attention.out.weight.detach().float()),
            fc=prepare(fc),
            proj=prepare(proj),
            after=after,
        )

    def __call__(
        self, x_ND: Tensor, phases: Tensor, value: Tensor | None, kept: Tensor, work: Work
    ) -> Tensor:
        """`kept` is the layer's part of the cache; the tokens at hand are written, then read."""
        x_ND = x_ND + self._attend(normalise(x_ND, self.eps), phases, value, kept, work)
        if self.after is not None:
            x_ND = normalise(x_ND, self.eps) * self.after[0]
        x_ND = x_ND + self._mlp(normalise(x_ND, self.eps))
        if self.after is not None:
            x_ND = normalise(x_ND, self.eps) * self.after[1]
        return x_ND

    def _attend(
        self, z_ND: Tensor, phases: Tensor, value: Tensor | None, kept: Tensor, work: Work
    ) -> Tensor:
        H, K, E = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        made = self.inner(z_ND)
        qkv = made[:, : (H + 2 * K) * E].unflatten(1, (-1, E))
        v = qkv[:, H + K :]
        if value is not None:
            gate = made[:, (H + 2 * K) * E :][:, :K].sigmoid()
            v = torch.addcmul(v, gate[..., None], value, value=2.0)
        qk = rotate(qkv[:, : H + K], phases)
        if self.qk_norm:
            qk = normalise(qk, QK_NORM_EPS)
        work.write(kept, qk[:, H:], v)
        return self.out(work.attend(qk[:, :H], kept).flatten(1))

    def _mlp(self, z_ND: Tensor) -> Tensor:
        hidden = self.fc(z_ND)
        if self.gated_mlp:
            gate, up = hidden.chunk(2, dim=-1)
            return self.proj(F.silu(gate).mul_(up))
        return self.proj(hidden.relu_().square_())


def rotate(x_NHE: Tensor, phases: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1), as complex numbers, by the phases [N, 1, E/2] of positions."""
    pairs = torch.view_as_complex(x_NHE.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * phases).flatten(-2)


def phase_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos + i sin of the angle of every position [S, 1, E/2]."""
    from parcae.model.blocks import rope_table

    cos, sin = rope_table(length, head_dim, theta, device)
    return torch.complex(cos, sin)


def float_product(weight: Tensor) -> Product:
    weight = weight.contiguous()
    return lambda x: F.linear(x, weight)


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers one after the other, with the part of the cache that each may use."""

    layers: Sequence[Layer]

    def __call__(
        self,
        x: Tensor,
        phases: Tensor,
        values: Sequence[Tensor | None],
        kept: Callable[[int], Tensor],
        work: Work,
    ) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, phases, values[index], kept(index), work)
        return x
