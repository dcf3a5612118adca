"""A model in the form used for decoding: its stages over a cache, for a batch of tokens.

    drive = network.begin(batch, cache)                              prelude and B_bar e
    h     = network.loop(h, drive, batch, cache, range(1, 9))        loops 1 to 8
    x     = network.read(h, batch, cache)                            coda
    network.logits(x)

These are PyTorch operators. `network.native` runs all stages in one call of C++, for a few tokens
on a CPU. A Transformer is a network without loops: all its layers are in the prelude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import ModelConfig
from parcae.infer.batch import Batch
from parcae.infer.cache import Cache, Layout, Policy
from parcae.infer.layers import CachedStack, Layer, Prepare, ScaledNorm, phase_table
from parcae.infer.native.kernels import Kernels
from parcae.infer.native.network import NativeNetwork
from parcae.infer.quantise import Matrix, Weights, aligned, matrix, to_int8
from parcae.model.frame import LanguageModel
from parcae.model.injection import (
    AdditionInjection,
    ConcatenationInjection,
    DiagonalInjection,
    Injection,
)
from parcae.model.looped import LoopedModel
from parcae.model.transformer import Transformer


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast, which would round folded weights and the cache."""
    if not torch.is_autocast_enabled(device.type):  # this check is much faster than disabling
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


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
        return LinearMix(_apply(function, self.into), self.decay, _apply(function, self.transition))

    @property
    def matrices(self) -> list[Matrix]:
        return [one for one in (self.into, self.transition) if one is not None]


class ModuleMix:
    """Any other injection, through its methods `prepare` and `mix`, in float32."""

    def __init__(self, injection: Injection, width: int, device: torch.device) -> None:
        self.injection = deepcopy(injection).float().requires_grad_(False).eval()
        self.transition = self.injection.prepare(torch.zeros(1, 1, width, device=device))[0]

    def drive(self, e: Tensor) -> Tensor:
        return self.injection.prepare(e[None])[1][0]

    def __call__(self, h: Tensor, drive: Tensor) -> Tensor:
        return self.injection.mix(h[None], self.transition, drive[None])[0]


def _mix(injection: Injection, prepare: Prepare, width: int, device: torch.device):
    """Built-in injections as matrices, others (and subclasses of these) as modules."""
    if type(injection) is AdditionInjection:
        return LinearMix(None)
    if type(injection) is DiagonalInjection:
        into = prepare(injection.input_matrix())
        return LinearMix(into, decay=injection.decay().detach().contiguous())
    if type(injection) is ConcatenationInjection:
        into = prepare(injection.input_matrix())
        return LinearMix(into, transition=prepare(injection.transition_matrix()))
    return ModuleMix(injection, width, device)


class Network:
    def __init__(
        self, model: LanguageModel, weights: Weights = "float32", kernels: Kernels | None = None
    ) -> None:
        """With `kernels`, passes of a few tokens run in C++ if it has the model's injection."""
        with torch.no_grad(), without_autocast(model.device):
            self._build(model, weights)
            self.native: NativeNetwork | None = None
            if kernels is not None and isinstance(self.mix, LinearMix):
                self.native = NativeNetwork(self, self.mix, kernels)

    def _build(self, model: LanguageModel, weights: Weights) -> None:
        config: ModelConfig = model.config

        def prepare(weight: Tensor) -> Matrix:
            return matrix(weight, weights)

        def stack(blocks: Iterable[nn.Module]) -> CachedStack:
            return CachedStack([Layer.of(block, prepare) for block in blocks])  # type: ignore

        self.config = config
        self.weights: Weights = weights
        self.layout = Layout.of(config)
        self.device = model.device
        self.embedding = _table(model.embed)
        self.value_tables = {int(k): _table(t) for k, t in model.value_tables.items()}
        self.prelude_norm: ScaledNorm | None = None
        self.readout: Matrix | None = None
        self.mix: LinearMix | ModuleMix = LinearMix(None)
        if isinstance(model, LoopedModel):
            parts = (model.prelude.blocks, model.loop.core.blocks, model.coda.blocks)
            self.prelude, self.core, self.coda = map(stack, parts)
            injection = model.loop.core.injection
            self.mix = _mix(injection, prepare, config.width, model.device)
            if model.prelude.norm is not None:
                self.prelude_norm = ScaledNorm.of(model.prelude.norm.weight, config.norm_eps)
            if model.coda.readout is not None:
                self.readout = prepare(model.coda.readout.weight)
            final = model.coda.norm
        elif isinstance(model, Transformer):
            self.prelude, self.core, self.coda = map(stack, (model.blocks, [], []))
            final = model.norm
        else:
            raise TypeError(f"{type(model).__name__}: must be a LoopedModel or a Transformer.")
        self.final_norm = ScaledNorm.of(final.weight, config.norm_eps)
        self.unembedding = self.embedding if model.head is None else _table(model.head)
        self.head = prepare(self.unembedding)
        length, theta = config.context_length, config.rope_theta
        self.outer_phases = phase_table(length, config.block.head_dim, theta, self.device)
        self.core_phases = phase_table(length, config.core_block.head_dim, theta, self.device)

    @cached_property
    def drafter(self) -> Network:
        """The network for speculative drafts: a copy with int8 matrices where those are faster,
        which shares all other tensors; else this network."""
        if self.native is None or self.weights != "float32" or isinstance(self.mix, ModuleMix):
            return self
        draft = copy(self)
        draft.weights = "int8"
        draft.prelude, draft.core, draft.coda = (
            stack.map(to_int8) for stack in (self.prelude, self.core, self.coda)
        )
        draft.mix = self.mix.map(to_int8)
        draft.readout, draft.head = _apply(to_int8, self.readout), to_int8(self.head)
        draft.native = NativeNetwork(draft, draft.mix, self.native.kernels)
        return draft

    @property
    def matrices(self) -> list[Matrix]:
        stacks = (self.prelude, self.core, self.coda)
        inner = [one for stack in stacks for layer in stack.layers for one in layer.matrices]
        mix = self.mix.matrices if isinstance(self.mix, LinearMix) else []
        readout = [] if self.readout is None else [self.readout]
        return [*inner, *mix, *readout, self.head]

    @property
    def weight_bytes(self) -> int:
        """Memory of all tables and matrices, including those of drafts; shared ones count once."""
        tensors = [self.embedding, self.unembedding, *self.value_tables.values()]
        networks = {id(one): one for one in (self, self.__dict__.get("drafter", self))}.values()
        tensors += [matrix.stored for network in networks for matrix in network.matrices]
        if isinstance(self.mix, ModuleMix):
            tensors += self.mix.injection.parameters()
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def cache(self, policy: Policy) -> Cache:
        """An empty cache for this network."""
        return Cache(self.layout, policy, torch.float32, self.device)

    def begin(self, batch: Batch, cache: Cache) -> Tensor:
        """B_bar e, the input of every loop [N, d_h]; of a Transformer the last layer's output."""
        x = F.embedding(batch.id_tensor, self.embedding)
        x = self._outer(x, self.prelude, 0, cache.prelude_layers, batch)
        if self.prelude_norm is not None:
            x = self.prelude_norm(x)
        return self.mix.drive(x)

    def initial_state(self, batch: Batch) -> Tensor:
        """h_0 of all tokens: zeros [N, d_h]."""
        width = self.config.core_block.width
        return torch.zeros(len(batch), width, dtype=torch.float32, device=self.device)

    def loop(self, h: Tensor, drive: Tensor, batch: Batch, cache: Cache, loops: range) -> Tensor:
        """h after the given loops, counted from 1, of all tokens [N, d_h]."""
        if not self.core.layers:
            return drive
        phases = self.core_phases[batch.position_tensor]
        values = self._values(batch, self.layout.prelude_layers, len(self.core.layers))
        for loop in loops:
            h = self.core(self.mix(h, drive), phases, values, cache.core_layers(loop), batch)
        return h

    def read(self, h: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Readout, coda and final norm: the input of the head [N, d_e]."""
        x = h if self.readout is None else self.readout(h)
        first = self.layout.prelude_layers + self.layout.core_layers
        return self.final_norm(self._outer(x, self.coda, first, cache.coda_layers, batch))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def _outer(
        self, x: Tensor, stack: CachedStack, first: int, kv: Sequence[Tensor], batch: Batch
    ) -> Tensor:
        phases = self.outer_phases[batch.position_tensor]
        return stack(x, phases, self._values(batch, first, len(stack.layers)), kv, batch)

    def _values(self, batch: Batch, first: int, layers: int) -> list[Tensor | None]:
        """The tokens' value embeddings [N, K, E] for layers that have them."""

        def look_up(layer: int) -> Tensor | None:
            table = self.value_tables.get(layer)
            if table is None:
                return None
            head_dim = self.config.block_of_layer(layer).head_dim
            return F.embedding(batch.id_tensor, table).unflatten(-1, (-1, head_dim))

        return [look_up(layer) for layer in range(first, first + layers)]


def _apply(function: Callable[[Matrix], Matrix], matrix: Matrix | None) -> Matrix | None:
    return None if matrix is None else function(matrix)


def _table(module: nn.Module) -> Tensor:
    return aligned(module.weight.detach().float())  # type: ignore[union-attr]
