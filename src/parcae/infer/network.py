"""The three stages of a looped model over a cache, for tokens of any number of sequences.

    given = network.begin(ids, work, cache)                          what every loop is given
    h     = network.loop(h, given, work, cache, range(1, 9))         the first eight loops
    x     = network.read(h, given, work, cache)                      coda
    network.logits(x)

A Transformer is a network without a loop: its layers are all prelude.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import ModelConfig
from parcae.infer.cache import Cache, Layout, Policy
from parcae.infer.layers import Layer, Prepare, ScaledNorm, Stack, phase_table
from parcae.infer.native.kernels import DepthFields, Kernels, MixFields
from parcae.infer.native.stack import NativeStack
from parcae.infer.quantise import Matrix, Weights, matrix
from parcae.infer.work import Work
from parcae.model.frame import LanguageModel
from parcae.model.injection import AdditionInjection, DiagonalInjection, Injection
from parcae.model.looped import LoopedModel
from parcae.model.transformer import Transformer


class Given(NamedTuple):
    """What no loop changes, for each token at hand."""

    drive: Tensor
    """B_bar e [N, d_h]; the last layer's output itself where there is no loop."""
    core_phases: Tensor
    core_values: Sequence[Tensor | None]
    coda_phases: Tensor
    coda_values: Sequence[Tensor | None]

    def only(self, tokens: Tensor) -> Given:
        def pick(values: Sequence[Tensor | None]) -> list[Tensor | None]:
            return [None if value is None else value[tokens] for value in values]

        return Given(
            self.drive[tokens],
            self.core_phases[tokens],
            pick(self.core_values),
            self.coda_phases[tokens],
            pick(self.coda_values),
        )


def joined(parts: Sequence[Given]) -> Given:
    """The tokens of several passes as those of one."""

    def join(values: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        return [
            None if column[0] is None else torch.cat(column)  # type: ignore[arg-type]
            for column in zip(*values, strict=True)
        ]

    return Given(
        torch.cat([part.drive for part in parts]),
        torch.cat([part.core_phases for part in parts]),
        join([part.core_values for part in parts]),
        torch.cat([part.coda_phases for part in parts]),
        join([part.coda_values for part in parts]),
    )


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Without gradient, and in the precision of the weights also where a caller trains in another:
    autocast would round what is folded and cached."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True, eq=False)
class Build:
    """Stacks of layers from the blocks of a model."""

    prepare: Prepare
    kernels: Kernels | None
    context: int

    def __call__(self, blocks: Iterable[nn.Module]) -> Stack:
        layers = [Layer.of(block, self.prepare) for block in blocks]  # type: ignore[arg-type]
        if self.kernels is None:
            return Stack(layers)
        return NativeStack(layers, self.kernels, self.context)


@dataclass(frozen=True, eq=False)
class Loop:
    """x = A_bar h + drive, then the core's layers."""

    into: Matrix | None
    """B_bar; None where e itself is what is added."""
    transition: Tensor | Matrix | None
    """A_bar: its diagonal, or a matrix, or None for 1."""
    stack: Stack

    @classmethod
    def of(cls, model: LoopedModel, prepare: Prepare, build: Build) -> Loop:
        injection: Injection = model.loop.core.injection
        stack = build(model.loop.core.blocks)
        if isinstance(injection, AdditionInjection):
            return cls(None, None, stack)
        into = prepare(injection.input_matrix())
        if isinstance(injection, DiagonalInjection):
            return cls(into, injection.decay().detach().contiguous(), stack)
        return cls(into, prepare(injection.transition_matrix()), stack)

    def drive(self, e: Tensor) -> Tensor:
        return e if self.into is None else self.into(e)

    def run(self, h: Tensor, given: Given, work: Work, cache: Cache, loops: range) -> Tensor:
        """The loops, counted from 1."""
        phases, values = given.core_phases, given.core_values
        if isinstance(self.stack, NativeStack) and self.stack.takes(work):
            kept = [part for loop in loops for part in cache.core_layers(loop)]
            drive = given.drive.contiguous()
            mix = self._mix
            return self.stack.run(h, phases, values, kept, work, mix, drive, len(loops))
        for loop in loops:
            x = self._mixed(h, given.drive)
            h = self.stack(x, phases, values, cache.core_layers(loop), work)
        return h

    def run_each(
        self,
        h: Tensor,
        given: Given,
        work: Work,
        cache: Cache,
        limits: Sequence[int],
        thresholds: Sequence[float],
    ) -> tuple[Tensor, list[int]] | None:
        """Every part to its limit, or until a loop moves its state by less than its threshold,
        where that is not 0. None where only PyTorch can run this pass."""
        if not (isinstance(self.stack, NativeStack) and self.stack.takes(work)):
            return None
        counts = torch.tensor([part.count for part in work.parts], device="cpu")
        most = torch.tensor(limits, device="cpu").repeat_interleave(counts)
        least = torch.tensor(thresholds, dtype=torch.float32, device="cpu")
        least = least.repeat_interleave(counts)
        done, index = torch.empty_like(most), torch.empty_like(most)
        depth = DepthFields(*(x.data_ptr() for x in (most, least, done, index)))
        loops = range(1, max(limits) + 1)
        kept = [part for loop in loops for part in cache.core_layers(loop)]
        phases, values, drive = given.core_phases, given.core_values, given.drive.contiguous()
        mix = self._mix
        h = self.stack.run(h, phases, values, kept, work, mix, drive, len(loops), depth)
        return h, done[work.last_tokens].tolist()

    def _mixed(self, h: Tensor, drive: Tensor) -> Tensor:
        if isinstance(self.transition, Matrix):
            return self.transition.add_to(drive, h)
        if self.transition is None:
            return h + drive
        return torch.addcmul(drive, self.transition, h)

    @cached_property
    def _mix(self) -> MixFields:
        if isinstance(self.transition, Matrix):
            return MixFields(None, self.transition.fields)
        return MixFields(None if self.transition is None else self.transition.data_ptr())


class Network:
    def __init__(
        self, model: LanguageModel, weights: Weights = "float32", kernels: Kernels | None = None
    ) -> None:
        """With `kernels`, passes of a few tokens go through the C++ layers."""
        with exactly(model.device):
            self._build(model, weights, kernels)

    def _build(self, model: LanguageModel, weights: Weights, kernels: Kernels | None) -> None:
        config: ModelConfig = model.config
        matrices: list[Matrix] = []

        def prepare(weight: Tensor) -> Matrix:
            matrices.append(matrix(weight, weights, kernels))
            return matrices[-1]

        build = Build(prepare, kernels, config.context_length)
        self.config = config
        self.weights: Weights = weights
        self.kernels = kernels
        self.layout = Layout.of(config)
        self.device = model.device
        self.embedding = model.embed.weight.detach()
        self.value_tables = {int(k): t.weight.detach() for k, t in model.value_tables.items()}  # type: ignore
        self.prelude_norm: ScaledNorm | None = None
        self.loop_body: Loop | None = None
        self.readout: Matrix | None = None
        if isinstance(model, LoopedModel):
            self.prelude = build(model.prelude.blocks)
            self.coda = build(model.coda.blocks)
            self.loop_body = Loop.of(model, prepare, build)
            if model.prelude.norm is not None:
                self.prelude_norm = ScaledNorm.of(model.prelude.norm.weight, config.norm_eps)
            if model.coda.readout is not None:
                self.readout = prepare(model.coda.readout.weight)
            final = model.coda.norm
        elif isinstance(model, Transformer):
            self.prelude, self.coda = build(model.blocks), Stack([])
            final = model.norm
        else:
            raise TypeError(f"{type(model).__name__}: not a model that can be decoded here.")
        self.final_norm = ScaledNorm.of(final.weight, config.norm_eps)
        self.unembedding = model.unembedding.detach().float()
        self.head = prepare(self.unembedding)
        tables = (self.embedding, self.unembedding, *self.value_tables.values())
        held = (*tables, *(one.stored for one in matrices))
        self.weight_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
        """Memory of all tables and matrices; what is shared counts once."""
        length, theta = config.context_length, config.rope_theta
        self.outer_phases = phase_table(length, config.block.head_dim, theta, self.device)
        self.core_phases = phase_table(length, config.core_block.head_dim, theta, self.device)

    @property
    def has_loop(self) -> bool:
        return self.loop_body is not None

    def cache(self, policy: Policy) -> Cache:
        """An empty one; it takes room when it is told how much."""
        return Cache(self.layout, policy, torch.float32, self.device)

    def begin(self, ids: Tensor, work: Work, cache: Cache) -> Given:
        phases = self.outer_phases[work.positions]
        layers = self.layout.prelude_layers
        x = F.embedding(ids, self.embedding).float()
        x = self.prelude(x, phases, self._values(ids, 0, layers), cache.prelude_layers, work)
        if self.loop_body is None:
            return Given(x, phases, (), phases, ())
        if self.prelude_norm is not None:
            x = self.prelude_norm(x)
        core_layers = self.layout.core_layers
        return Given(
            self.loop_body.drive(x),
            self.core_phases[work.positions],
            self._values(ids, layers, core_layers),
            phases,
            self._values(ids, layers + core_layers, self.layout.coda_layers),
        )

    def initial_state(self, given: Given) -> Tensor:
        return torch.zeros_like(given.drive)

    def loop(self, h: Tensor, given: Given, work: Work, cache: Cache, loops: range) -> Tensor:
        """The loops asked for, counted from 1; all tokens take part."""
        if self.loop_body is None:
            return given.drive
        return self.loop_body.run(h, given, work, cache, loops)

    def read(self, h: Tensor, given: Given, work: Work, cache: Cache) -> Tensor:
        """What the head reads: normed, [N, d_e]."""
        x = h if self.readout is None else self.readout(h)
        x = self.coda(x, given.coda_phases, given.coda_values, cache.coda_layers, work)
        return self.final_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def _values(self, ids: Tensor, first_layer: int, layers: int) -> list[Tensor | None]:
        found = (self.value_tables.get(first_layer + i) for i in range(layers))
        return [None if table is None else self._value(ids, table, first_layer) for table in found]

    def _value(self, ids: Tensor, table: Tensor, layer: int) -> Tensor:
        head_dim = self.config.block_of_layer(layer).head_dim
        return F.embedding(ids, table).float().unflatten(-1, (-1, head_dim))
