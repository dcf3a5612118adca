"""The stages of a network for a few tokens on a CPU: each one call of C++, or all of them one."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from parcae.infer.cache import Cache
from parcae.infer.exit import compared_tokens
from parcae.infer.layers import Layer
from parcae.infer.native.fields import LayerFields, ModelFields, address, numbers
from parcae.infer.native.kernels import MOST_TOKENS, Kernels, matrix_fields, threads_for
from parcae.infer.work import Work

if TYPE_CHECKING:
    from parcae.infer.network import Network


MEASURES = {"state": 0, "kl": 1, "entropy": 2}
"""As `predictions.h` numbers them."""


class Depth(NamedTuple):
    """When the parts of a pass stop looping."""

    limits: Sequence[int]
    """After so many loops."""
    least_changes: Sequence[float]
    """Or when a loop changes less than this; 0 is never."""
    kinds: Sequence[str | None]
    """The rules that say what it has to change."""
    settled: Sequence[int]
    """Slots of the loops up to this one receive the keys and values of the last that was run."""

    @property
    def measures(self) -> list[int]:
        """What is looked at after every loop; predictions only where they can be a reason to stop,
        which takes two."""
        each = zip(self.kinds, self.least_changes, self.limits, strict=True)
        return [
            MEASURES.get(kind or "", 0) if least > 0 and limit > 1 else 0
            for kind, least, limit in each
        ]


class NativeNetwork:
    def __init__(self, network: Network, kernels: Kernels) -> None:
        self.network, self.kernels = network, kernels
        stacks = (network.prelude, network.core, network.coda)
        layers = [layer for stack in stacks for layer in stack.layers]
        tables = [network.value_tables.get(number) for number in range(len(layers))]
        filled = map(_layer_fields, layers, tables)
        self._layers = (LayerFields * max(1, len(layers)))(*filled)
        self._model = _model_fields(network, self._layers)
        sizes = [sum(one.stored.numel() for one in layer.matrices) for layer in layers]
        self._products = max(sizes, default=0)
        self._scratch: dict[int, Tensor] = {}

    def takes(self, work: Work) -> bool:
        return 0 < work.tokens <= MOST_TOKENS

    def begin(self, work: Work, cache: Cache) -> Tensor:
        drive = self._states(work)
        self._run(work, cache, torch.empty_like(drive), drive=drive, begins=True)
        return drive

    def loop(self, h: Tensor, drive: Tensor, work: Work, cache: Cache, loops: range) -> Tensor:
        if not self._model.core:
            return drive
        h = h.clone(memory_format=torch.contiguous_format)
        self._run(work, cache, h, drive=drive.contiguous(), loops=loops)
        return h

    def read(self, h: Tensor, work: Work, cache: Cache) -> Tensor:
        x = _empty(work.tokens, self.network.config.width)
        self._run(work, cache, h.contiguous(), x=x, reads=True)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.kernels.multiply(self.network.head, x)

    def all_at_once(
        self,
        work: Work,
        cache: Cache,
        loops: range,
        depth: Depth | None,
        start: Tensor | None,
        predict: Sequence[int],
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Logits of the tokens to predict from, states, and how often each token has looped, where
        `depth` was given. States begin at zero, or at `start`."""
        if not self._model.core:
            depth, loops = None, range(0)
        watches = depth is not None and any(depth.measures)
        wanted = range(work.tokens) if watches else predict
        logits = _empty(len(wanted), self.network.config.vocab_size)
        state = self._states(work)
        if start is not None:
            state.copy_(start)
        ran = self._run(
            work,
            cache,
            state,
            begins=True,
            from_zero=start is None,
            loops=loops,
            depth=depth,
            reads=True,
            predict=wanted,
            logits=logits,
        )
        return logits if wanted == predict else logits[list(predict)], state, ran

    def _run(
        self,
        work: Work,
        cache: Cache,
        state: Tensor,
        *,
        begins: bool = False,
        from_zero: bool = False,
        loops: range = range(0),
        depth: Depth | None = None,
        reads: bool = False,
        drive: Tensor | None = None,
        x: Tensor | None = None,
        predict: Sequence[int] = (),
        logits: Tensor | None = None,
    ) -> list[int]:
        threads = threads_for(self._products * work.tokens)
        places = [numbers(some) for some in (work.ids, work.rows, work.positions)]
        slots, predict = numbers(map(cache.policy.slot, loops)), numbers(predict)
        limits = settled = least = measures = order = ran = index = None
        watched = 0
        if depth is not None:
            limits, settled = numbers(work.each(depth.limits)), numbers(work.each(depth.settled))
            measures = numbers(work.each(depth.measures))
            watched = work.tokens - measures.count(0)
            order = numbers(sorted(range(work.tokens), key=lambda token: not measures[token]))
            ran, index = numbers(order), numbers(order)
            if any(depth.least_changes):
                least = array("f", work.each(depth.least_changes))
        fields = (
            work.tokens,
            *map(address, places),
            *cache.places,
            begins,
            reads,
            from_zero,
            len(loops),
            *map(address, (slots, limits, settled, least, measures)),
            watched,
            *map(address, (order, ran, index, state, drive, x)),
            len(predict),
            *map(address, (predict, logits, self._room(threads))),
            threads,
        )
        self.kernels.run(self._model, numbers(fields))
        return [] if ran is None else ran.tolist()

    def _states(self, work: Work) -> Tensor:
        return _empty(work.tokens, self.network.config.core_block.width)

    def _room(self, threads: int) -> Tensor:
        if threads not in self._scratch:
            self._scratch[threads] = self.kernels.scratch(self._model, MOST_TOKENS, threads)
        return self._scratch[threads]


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _layer_fields(layer: Layer, values: Tensor | None) -> LayerFields:
    head_dim = layer.shape.head_dim
    after = (None, None) if layer.after is None else layer.after
    return LayerFields(
        *map(matrix_fields, layer.matrices),
        *(None if norm is None else address(norm.scale) for norm in after),
        address(values),
        float(layer.norm.floor) ** 2,
        -1.0 if layer.qk_norm is None else float(layer.qk_norm.floor) ** 2,
        1 / math.sqrt(head_dim) if layer.qk_norm is None else math.sqrt(head_dim),
        layer.shape.heads,
        layer.shape.kv_heads,
        head_dim,
        layer.gated_mlp,
    )


def _model_fields(network: Network, layers: ctypes.Array) -> ModelFields:
    config, layout = network.config, network.layout
    norm = network.prelude_norm
    return ModelFields(
        ctypes.addressof(layers),
        layout.prelude_layers,
        layout.core_layers,
        layout.coda_layers,
        config.width,
        config.core_block.width,
        config.context_length,
        *map(address, (network.embedding, network.outer_phases, network.core_phases)),
        None if norm is None else address(norm.scale),
        address(network.final_norm.scale),
        float(network.final_norm.unit.floor) ** 2,
        matrix_fields(network.mix.into),
        matrix_fields(network.mix.transition),
        address(network.mix.decay),
        matrix_fields(network.readout),
        matrix_fields(network.head),
        address(network.unembedding),
        compared_tokens(config.vocab_size),
    )
