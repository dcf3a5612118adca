"""The weights of a model in the form used for decoding: `FoldedModel` and its layers.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import BlockShape, ModelConfig, require
from parcae.infer.batch import AttentionBatch
from parcae.infer.cache import CACHE_DTYPES, Cache, CacheDType, Layout, Policy
from parcae.infer.quantise import FloatMatrix, Matrix, WeightDType, aligned, matrix, to_int8
from parcae.model.base import LanguageModel
from parcae.model.blocks import QK_NORM_EPS, Block, rope_table
from parcae.model.injection import (
    AdditionInjection,
    ConcatenationInjection,
    DiagonalInjection,
    Injection,
)
from parcae.model.looped import LoopedModel
from parcae.model.transformer import Transformer

Prepare = Callable[[Tensor], Matrix]
"""Converts a weight [out, in] to the format in which it is stored."""


class UnitNorm:
    """x / sqrt(|x|^2 + D eps): RMS norm without sqrt(D), which `fold` puts in a matrix."""

    def __init__(self, width: int, eps: float, device: torch.device) -> None:
        self.width = width
        self.floor = torch.tensor(math.sqrt(width * eps), device=device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:  # the length in full precision
            return self(x.float()).to(x.dtype)
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
    def of(cls, scale: Tensor, eps: float, dtype: torch.dtype) -> ScaledNorm:
        unit = UnitNorm(len(scale), eps, scale.device)
        return cls(unit, (scale.detach().float() * math.sqrt(len(scale))).to(dtype))

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
    def of(cls, block: Block, prepare: Prepare, dtype: torch.dtype) -> Layer:
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
                ScaledNorm.of(block.norm_after_attn.weight, eps, dtype),
                ScaledNorm.of(block.norm_after_mlp.weight, eps, dtype),
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
        self, x_ND: Tensor, phases: Tensor, value: Tensor | None, kv: Any, batch: AttentionBatch
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
        self, z_ND: Tensor, phases: Tensor, value: Tensor | None, kv: Any, batch: AttentionBatch
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
    times the phases of their positions [N, 1, E/2], or [N, 1, E/2, 2] as real numbers, which
    compilers and other types than float32 need. Returns [N, H, E]."""
    if not phases.is_complex():
        real, imaginary = x.float().unflatten(1, (-1, phases.shape[-2], 2)).unbind(-1)
        cos, sin = phases.unbind(-1)
        turned = (real * cos - imaginary * sin, real * sin + imaginary * cos)
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)
    pairs = x.view(torch.complex64).unflatten(1, (-1, phases.shape[-1]))
    return (pairs * phases).view(torch.float32)


def phase_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos + i sin of the angle of every position [S, 1, E/2]."""
    return torch.complex(*rope_table(length, head_dim, theta, device))


@dataclass(frozen=True, eq=False)
class LinearMix:
    """x = A_bar h + B_bar e of the built-in injections, with folded matrices."""

    into: Matrix | None
    """B_bar; None is the identity."""
    decay: Tensor | None = None
    """The diagonal of A_bar, if it is diagonal."""
    transition: Matrix | None = None
    """A_bar, if it is dense. With neither `decay` nor `transition` it is the identity."""

    def drive(self, e: Tensor) -> Tensor:
        """B_bar e [N, d_h], which is the same in every loop."""
        return e if self.into is None else self.into(e)

    def __call__(self, h: Tensor, drive: Tensor) -> Tensor:
        if self.transition is not None:
            return self.transition.add_to(drive, h)
        return h + drive if self.decay is None else torch.addcmul(drive, self.decay, h)

    def map(self, function: Callable[[Matrix], Matrix]) -> LinearMix:
        """The same with `function` applied to the matrices."""
        return replace(
            self, into=_apply(function, self.into), transition=_apply(function, self.transition)
        )

    @property
    def matrices(self) -> list[Matrix]:
        return [one for one in (self.into, self.transition) if one is not None]


class ModuleMix:
    """Any other injection, through its methods `prepare` and `mix`."""

    def __init__(
        self, injection: Injection, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.injection = deepcopy(injection).to(dtype).requires_grad_(False).eval()
        zeros = torch.zeros(1, 1, width, dtype=dtype, device=device)
        self.transition = self.injection.prepare(zeros)[0]

    def drive(self, e: Tensor) -> Tensor:
        return self.injection.prepare(e[None])[1][0]

    def __call__(self, h: Tensor, drive: Tensor) -> Tensor:
        return self.injection.mix(h[None], self.transition, drive[None])[0]


def _mix(
    injection: Injection,
    prepare: Prepare,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LinearMix | ModuleMix:
    """Built-in injections as matrices, others (and subclasses of these) as modules."""
    if type(injection) is AdditionInjection:
        return LinearMix(None)
    if type(injection) is DiagonalInjection:
        into = prepare(injection.input_matrix())
        return LinearMix(into, decay=injection.decay().detach().to(dtype).contiguous())
    if type(injection) is ConcatenationInjection:
        into = prepare(injection.input_matrix())
        return LinearMix(into, transition=prepare(injection.transition_matrix()))
    return ModuleMix(injection, width, dtype, device)


@dataclass(frozen=True, eq=False)
class FoldedModel:
    """All weights of a model, ready to decode with. A Transformer is all prelude, without loops."""

    config: ModelConfig
    weight_dtype: WeightDType
    """The format of the matrices."""
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    """The dtype of activations and tables."""
    embedding: Tensor
    unembedding: Tensor
    """The head, not quantised [V, d_e]."""
    value_tables: Mapping[int, Tensor]
    """Value embeddings by layer, where there are any."""
    prelude: Sequence[Layer]
    core: Sequence[Layer]
    coda: Sequence[Layer]
    prelude_norm: ScaledNorm | None
    mix: LinearMix | ModuleMix
    readout: Matrix | None
    final_norm: ScaledNorm
    head: Matrix
    outer_phases: Tensor
    core_phases: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: LanguageModel,
        weight_dtype: WeightDType = "float32",
        dtype: torch.dtype | None = None,
    ) -> FoldedModel:
        """Shares memory with the model where nothing has to be folded or converted.

        `dtype`: the default is float32 on a CPU, else the model's. Matrices that are not int8 have
        it too, if it is not float32.
        """
        if dtype is None:
            on_cpu = model.device.type == "cpu"
            dtype = torch.float32 if on_cpu else model.embed.weight.dtype
        with without_autocast(model.device):
            return cls._fold(model, weight_dtype, dtype)

    @classmethod
    def _fold(
        cls, model: LanguageModel, weight_dtype: WeightDType, dtype: torch.dtype
    ) -> FoldedModel:
        config, device = model.config, model.device

        def prepare(weight: Tensor) -> Matrix:
            if dtype != torch.float32 and weight_dtype != "int8":
                return FloatMatrix(weight.detach().to(dtype))
            return matrix(weight, weight_dtype)

        def norm(module: nn.RMSNorm) -> ScaledNorm:
            return ScaledNorm.of(module.weight, config.norm_eps, dtype)

        def phases(head_dim: int) -> Tensor:
            table = phase_table(config.context_length, head_dim, config.rope_theta, device)
            return table if device.type == "cpu" and dtype == torch.float32 else as_real(table)

        prelude_norm = readout = None
        mix = LinearMix(None)
        if isinstance(model, LoopedModel):
            stacks = (model.prelude.blocks, model.loop.core.blocks, model.coda.blocks)
            mix = _mix(model.loop.core.injection, prepare, config.width, dtype, device)
            if model.prelude.norm is not None:
                prelude_norm = norm(model.prelude.norm)
            if model.coda.readout is not None:
                readout = prepare(model.coda.readout.weight)
            final_norm = norm(model.coda.norm)
        elif isinstance(model, Transformer):
            stacks, final_norm = (model.blocks, (), ()), norm(model.norm)
        else:
            raise TypeError(f"{type(model).__name__}: must be a LoopedModel or a Transformer.")
        prelude, core, coda = (
            [Layer.of(block, prepare, dtype) for block in stack]  # pyright: ignore[reportArgumentType]
            for stack in stacks
        )
        embedding = _table(model.embed, dtype)
        unembedding = embedding if model.head is None else _table(model.head, dtype)
        return cls(
            config=config,
            weight_dtype=weight_dtype,
            layout=Layout.of(config),
            device=device,
            dtype=dtype,
            embedding=embedding,
            unembedding=unembedding,
            value_tables={int(k): _table(table, dtype) for k, table in model.value_tables.items()},
            prelude=prelude,
            core=core,
            coda=coda,
            prelude_norm=prelude_norm,
            mix=mix,
            readout=readout,
            final_norm=final_norm,
            head=prepare(unembedding),
            outer_phases=phases(config.block.head_dim),
            core_phases=phases(config.core_block.head_dim),
        )

    @property
    def layers(self) -> list[Layer]:
        return [*self.prelude, *self.core, *self.coda]

    def cache(
        self,
        policy: Policy | str = "full",
        max_bytes: int | None = None,
        dtype: CacheDType | None = None,
    ) -> Cache:
        """An empty cache for this model. `dtype`: the default is the model's."""
        known = dtype is None or dtype in CACHE_DTYPES
        require(known, "cache_dtype", f"{dtype!r} is not an option", "Use float32 or bfloat16.")
        stored = self.dtype if dtype is None else getattr(torch, dtype)
        return Cache(self.layout, Policy.parse(policy), stored, self.device, max_bytes)

    def with_real_phases(self) -> FoldedModel:
        """The same model without complex numbers, which `torch.compile` does not generate code
        for; tensors are shared."""
        phases = as_real(self.outer_phases), as_real(self.core_phases)
        return replace(self, outer_phases=phases[0], core_phases=phases[1])

    def to_int8(self) -> FoldedModel:
        """The same model with int8 matrices; all other tensors are shared."""
        prelude, core, coda = (
            [layer.map(to_int8) for layer in stack]
            for stack in (self.prelude, self.core, self.coda)
        )
        mix = self.mix.map(to_int8) if isinstance(self.mix, LinearMix) else self.mix
        return replace(
            self,
            weight_dtype="int8",
            prelude=prelude,
            core=core,
            coda=coda,
            mix=mix,
            readout=_apply(to_int8, self.readout),
            head=to_int8(self.head),
        )

    @property
    def matrices(self) -> list[Matrix]:
        mix = self.mix.matrices if isinstance(self.mix, LinearMix) else []
        readout = [] if self.readout is None else [self.readout]
        return [
            *(one for layer in self.layers for one in layer.matrices),
            *mix,
            *readout,
            self.head,
        ]

    @property
    def constants(self) -> list[Tensor]:
        """Every tensor that decoding reads."""
        norms = [layer.norm for layer in self.layers] + [n for x in self.layers if (n := x.qk_norm)]
        scaled = [n for layer in self.layers for n in layer.after or ()]
        scaled += [n for n in (self.prelude_norm, self.final_norm) if n is not None]
        floors = [n.floor for n in (*norms, *(n.unit for n in scaled))]
        stored = [t for one in self.matrices for t in vars(one).values() if isinstance(t, Tensor)]
        mix = [t for t in vars(self.mix).values() if isinstance(t, Tensor)]
        phases = [self.outer_phases, self.core_phases]
        return [*self.tensors, *stored, *floors, *(n.scale for n in scaled), *mix, *phases]

    @property
    def tensors(self) -> list[Tensor]:
        """All tables and matrices."""
        mix = [] if isinstance(self.mix, LinearMix) else self.mix.injection.parameters()
        tables = (self.embedding, self.unembedding, *self.value_tables.values())
        return [*tables, *(part for one in self.matrices for part in one.tensors), *mix]


def as_real(phases: Tensor) -> Tensor:
    return torch.view_as_real(phases) if phases.is_complex() else phases


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors; those that share memory count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _apply(function: Callable[[Matrix], Matrix], matrix: Matrix | None) -> Matrix | None:
    return None if matrix is None else function(matrix)


def _table(module: nn.Module, dtype: torch.dtype) -> Tensor:
    return aligned(module.weight.detach().to(dtype))  # type: ignore[union-attr]


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast, which would round folded weights and the cache."""
    available = torch.amp.is_autocast_available(device.type)
    if not available or not torch.is_autocast_enabled(device.type):  # faster than disabling
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
