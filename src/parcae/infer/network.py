"""The three stages of a looped model over a cache, for tokens of any number of sequences.

    drive = network.begin(work, cache)                               what every loop is given
    h     = network.loop(h, drive, work, cache, range(1, 9))         the first eight loops
    x     = network.read(h, work, cache)                             coda
    network.logits(x)

Here they are PyTorch's operators. `network.native` has the same stages in C++, and all of them in
one call, for a few tokens on a CPU. A Transformer is a network without a loop: its layers are all
prelude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import ModelConfig
from parcae.infer.cache import Cache, Layout, Policy
from parcae.infer.layers import Layer, Prepare, ScaledNorm, Stack, phase_table
from parcae.infer.native.kernels import Kernels
from parcae.infer.native.network import NativeNetwork
from parcae.infer.quantise import Matrix, Weights, aligned, in_8_bits, matrix
from parcae.infer.work import Work
from parcae.model.frame import LanguageModel
from parcae.model.injection import AdditionInjection, DiagonalInjection, Injection
from parcae.model.looped import LoopedModel
from parcae.model.transformer import Transformer


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """In the precision of the weights also where a caller trains in another: autocast would round
    what is folded and cached."""
    if not torch.is_autocast_enabled(device.type):  # asking is much quicker than turning off
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True, eq=False)
class Mix:
    """x = A_bar h + B_bar e, with which every loop begins."""

    into: Matrix | None
    """B_bar; None where e itself is what is added."""
    decay: Tensor | None = None
    """The diagonal of A_bar, where it is one."""
    transition: Matrix | None = None
    """A_bar, where it is not. Where there is neither it is 1."""

    @classmethod
    def of(cls, injection: Injection, prepare: Prepare) -> Mix:
        if isinstance(injection, AdditionInjection):
            return cls(None)
        into = prepare(injection.input_matrix())
        if isinstance(injection, DiagonalInjection):
            return cls(into, decay=injection.decay().detach().contiguous())
        return cls(into, transition=prepare(injection.transition_matrix()))

    def drive(self, e: Tensor) -> Tensor:
        return e if self.into is None else self.into(e)

    def __call__(self, h: Tensor, drive: Tensor) -> Tensor:
        if self.transition is not None:
            return self.transition.add_to(drive, h)
        return h + drive if self.decay is None else torch.addcmul(drive, self.decay, h)


class Network:
    def __init__(
        self, model: LanguageModel, weights: Weights = "float32", kernels: Kernels | None = None
    ) -> None:
        """With `kernels`, passes of a few tokens can go through C++."""
        with torch.no_grad(), exactly(model.device):
            self._build(model, weights)
            self.native = None if kernels is None else NativeNetwork(self, kernels)

    def _build(self, model: LanguageModel, weights: Weights) -> None:
        config: ModelConfig = model.config

        def prepare(weight: Tensor) -> Matrix:
            return matrix(weight, weights)

        def stack(blocks: Iterable[nn.Module]) -> Stack:
            return Stack([Layer.of(block, prepare) for block in blocks])  # type: ignore[arg-type]

        self.config = config
        self.weights: Weights = weights
        self.layout = Layout.of(config)
        self.device = model.device
        self.embedding = _table(model.embed)
        self.value_tables = {int(k): _table(t) for k, t in model.value_tables.items()}
        self.prelude_norm: ScaledNorm | None = None
        self.readout: Matrix | None = None
        self.mix = Mix(None)
        if isinstance(model, LoopedModel):
            parts = (model.prelude.blocks, model.loop.core.blocks, model.coda.blocks)
            self.prelude, self.core, self.coda = map(stack, parts)
            self.mix = Mix.of(model.loop.core.injection, prepare)
            if model.prelude.norm is not None:
                self.prelude_norm = ScaledNorm.of(model.prelude.norm.weight, config.norm_eps)
            if model.coda.readout is not None:
                self.readout = prepare(model.coda.readout.weight)
            final = model.coda.norm
        elif isinstance(model, Transformer):
            self.prelude, self.core, self.coda = stack(model.blocks), Stack([]), Stack([])
            final = model.norm
        else:
            raise TypeError(f"{type(model).__name__}: not a model that can be decoded here.")
        self.final_norm = ScaledNorm.of(final.weight, config.norm_eps)
        self.unembedding = self.embedding if model.head is None else _table(model.head)
        self.head = prepare(self.unembedding)
        length, theta = config.context_length, config.rope_theta
        self.outer_phases = phase_table(length, config.block.head_dim, theta, self.device)
        self.core_phases = phase_table(length, config.core_block.head_dim, theta, self.device)

    @cached_property
    def drafter(self) -> Network:
        """The same in 8 bits where those are quicker; it shares what is not a matrix."""
        if self.native is None or self.weights != "float32":
            return self
        twin = copy(self)
        twin.weights = "int8"
        twin.prelude, twin.core, twin.coda = (
            stack.map(in_8_bits) for stack in (self.prelude, self.core, self.coda)
        )
        mix = self.mix
        twin.mix = Mix(_some(in_8_bits, mix.into), mix.decay, _some(in_8_bits, mix.transition))
        twin.readout, twin.head = _some(in_8_bits, self.readout), in_8_bits(self.head)
        twin.native = NativeNetwork(twin, self.native.kernels)
        return twin

    @property
    def matrices(self) -> list[Matrix]:
        stacks = (self.prelude, self.core, self.coda)
        inner = [one for stack in stacks for layer in stack.layers for one in layer.matrices]
        others = (self.mix.into, self.mix.transition, self.readout, self.head)
        return [*inner, *(one for one in others if one is not None)]

    @property
    def weight_bytes(self) -> int:
        """Memory of all tables and matrices, also of a draft's; what is shared counts once."""
        tables = (self.embedding, self.unembedding, *self.value_tables.values())
        networks = {id(one): one for one in (self, self.__dict__.get("drafter", self))}.values()
        held = (*tables, *(one.stored for network in networks for one in network.matrices))
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())

    def cache(self, policy: Policy) -> Cache:
        """An empty one; it takes room when it is told how much."""
        return Cache(self.layout, policy, torch.float32, self.device)

    def begin(self, work: Work, cache: Cache) -> Tensor:
        """B_bar e [N, d_h], which no loop changes; the last layer's output itself where there is no
        loop."""
        x = F.embedding(work.id_tensor, self.embedding)
        x = self._outer(x, self.prelude, 0, cache.prelude_layers, work)
        if self.prelude_norm is not None:
            x = self.prelude_norm(x)
        return self.mix.drive(x)

    def loop(self, h: Tensor, drive: Tensor, work: Work, cache: Cache, loops: range) -> Tensor:
        """The loops asked for, counted from 1; all tokens take part."""
        if not self.core.layers:
            return drive
        phases = self.core_phases[work.position_tensor]
        values = self._values(work, self.layout.prelude_layers, len(self.core.layers))
        for loop in loops:
            h = self.core(self.mix(h, drive), phases, values, cache.core_layers(loop), work)
        return h

    def read(self, h: Tensor, work: Work, cache: Cache) -> Tensor:
        """What the head reads: normed, [N, d_e]."""
        x = h if self.readout is None else self.readout(h)
        first = self.layout.prelude_layers + self.layout.core_layers
        return self.final_norm(self._outer(x, self.coda, first, cache.coda_layers, work))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def _outer(
        self, x: Tensor, stack: Stack, first: int, kept: Sequence[Tensor], work: Work
    ) -> Tensor:
        phases = self.outer_phases[work.position_tensor]
        return stack(x, phases, self._values(work, first, len(stack.layers)), kept, work)

    def _values(self, work: Work, first: int, layers: int) -> list[Tensor | None]:
        """The tokens' value embeddings [N, K, E] for layers that have them."""

        def looked_up(layer: int) -> Tensor | None:
            table = self.value_tables.get(layer)
            if table is None:
                return None
            head_dim = self.config.block_of_layer(layer).head_dim
            return F.embedding(work.id_tensor, table).unflatten(-1, (-1, head_dim))

        return [looked_up(layer) for layer in range(first, first + layers)]


def _some(function: Callable[[Matrix], Matrix], one: Matrix | None) -> Matrix | None:
    return None if one is None else function(one)


def _table(module: nn.Module) -> Tensor:
    return aligned(module.weight.detach().float())  # type: ignore[union-attr]
