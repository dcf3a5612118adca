"""The three stages of a looped model over a cache, for tokens of any number of sequences.

    given = network.begin(ids, work, cache)          prelude, and what every loop is given
    h     = network.loop(h, given, work, cache, t)   one loop, the t-th
    x     = network.read(h, given, work, cache)      coda
    network.logits(x)

A Transformer is a network without a loop: its layers are all prelude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import ModelConfig, require
from parcae.infer.cache import Cache, Layout
from parcae.infer.layers import Layer, Prepare, Product, Stack, normalise, phase_table
from parcae.infer.quantise import PREPARATIONS, Weights
from parcae.infer.work import Work
from parcae.model.frame import LanguageModel
from parcae.model.injection import DiagonalInjection, Injection
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


@dataclass(frozen=True, eq=False)
class Loop:
    """x = A_bar h + drive, with A_bar as the injection has it, then the core's layers."""

    drive: Product
    mix: Callable[[Tensor, Tensor], Tensor]
    stack: Stack

    @classmethod
    def of(cls, model: LoopedModel, prepare: Prepare) -> Loop:
        core = model.loop.core
        stack = Stack([Layer.of(block, prepare) for block in core.blocks])  # type: ignore[arg-type]
        injection: Injection = core.injection
        if isinstance(injection, DiagonalInjection):
            decay = injection.decay().detach()
            return cls(
                prepare(injection.input_matrix().detach().float()),
                lambda h, drive: torch.addcmul(drive, decay, h),
                stack,
            )
        if model.config.injection == "addition":
            return cls(lambda e: e, torch.add, stack)
        transition = prepare(injection.transition_matrix().detach().float().contiguous())
        return cls(
            prepare(injection.input_matrix().detach().float().contiguous()),
            lambda h, drive: transition(h) + drive,
            stack,
        )


class Network:
    @torch.no_grad()
    def __init__(self, model: LanguageModel, weights: Weights = "float32") -> None:
        known = weights in PREPARATIONS
        remedy = f"Use one of {', '.join(PREPARATIONS)}."
        require(known, "weights", f"{weights!r} is not an option", remedy)
        prepare = PREPARATIONS[weights]
        config: ModelConfig = model.config
        self.config, self.weights = config, weights
        self.layout = Layout.of(config)
        self.device = model.device
        self.embedding = model.embed.weight.detach()
        self.value_tables = {int(k): t.weight.detach() for k, t in model.value_tables.items()}  # type: ignore
        self.eps = config.norm_eps
        self.prelude_scale: Tensor | None = None
        self.loop_body: Loop | None = None
        self.readout: Product | None = None
        layer = partial(Layer.of, prepare=prepare)
        if isinstance(model, LoopedModel):
            self.prelude = Stack([layer(block) for block in model.prelude.blocks])  # type: ignore
            self.coda = Stack([layer(block) for block in model.coda.blocks])  # type: ignore
            self.loop_body = Loop.of(model, prepare)
            if model.prelude.norm is not None:
                self.prelude_scale = model.prelude.norm.weight.detach().float()
            if model.coda.readout is not None:
                self.readout = prepare(model.coda.readout.weight.detach().float())
            final = model.coda.norm
        elif isinstance(model, Transformer):
            self.prelude = Stack([layer(block) for block in model.blocks])  # type: ignore
            self.coda = Stack([])
            final = model.norm
        else:
            raise TypeError(f"{type(model).__name__}: not a model that can be decoded here.")
        self.final_scale = final.weight.detach().float()
        self.unembedding = model.unembedding.detach().float()
        self.head = prepare(self.unembedding)
        length = config.context_length
        table = partial(phase_table, length, theta=config.rope_theta, device=self.device)
        self.outer_phases = table(head_dim=config.block.head_dim)
        self.core_phases = table(head_dim=config.core_block.head_dim)

    @property
    def has_loop(self) -> bool:
        return self.loop_body is not None

    def cache(self, policy, dtype: torch.dtype = torch.float32) -> Cache:
        return Cache(self.layout, policy, dtype, self.device)

    def begin(self, ids: Tensor, work: Work, cache: Cache) -> Given:
        phases = self.outer_phases[work.positions]
        layers = self.layout.prelude_layers
        x = F.embedding(ids, self.embedding).float()
        x = self.prelude(x, phases, self._values(ids, 0, layers), cache.prelude_layer, work)
        if self.loop_body is None:
            return Given(x, phases, (), phases, ())
        if self.prelude_scale is not None:
            x = normalise(x, self.eps) * self.prelude_scale
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

    def loop(self, h: Tensor, given: Given, work: Work, cache: Cache, loop: int) -> Tensor:
        if self.loop_body is None:
            return given.drive
        x = self.loop_body.mix(h, given.drive)
        kept = partial(cache.core_layer, loop=loop)
        return self.loop_body.stack(x, given.core_phases, given.core_values, kept, work)

    def read(self, h: Tensor, given: Given, work: Work, cache: Cache) -> Tensor:
        """What the head reads: normed, [N, d_e]."""
        x = h if self.readout is None else self.readout(h)
        x = self.coda(x, given.coda_phases, given.coda_values, cache.coda_layer, work)
        return normalise(x, self.eps) * self.final_scale

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x).float()

    def _values(self, ids: Tensor, first_layer: int, layers: int) -> list[Tensor | None]:
        found = (self.value_tables.get(first_layer + i) for i in range(layers))
        return [None if table is None else self._value(ids, table, first_layer) for table in found]

    def _value(self, ids: Tensor, table: Tensor, layer: int) -> Tensor:
        head_dim = self.config.block_of_layer(layer).head_dim
        return F.embedding(ids, table).float().unflatten(-1, (-1, head_dim))
