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
from parcae.infer.layers import Layer
from parcae.infer.native.fields import LayerFields, ModelFields, PassFields, address, numbers
from parcae.infer.native.kernels import MOST_TOKENS, Kernels, matrix_fields, threads_for
from parcae.infer.work import Work

if TYPE_CHECKING:
    from parcae.infer.network import Network


class Depth(NamedTuple):
    """When the parts of a pass stop looping."""

    limits: Sequence[int]
    """After so many loops."""
    least_changes: Sequence[float]
    """Or when a loop moves the state by less than this share of its length; 0 is never."""
    settled: Sequence[int]
    """Slots of the loops up to this one receive the keys and values of the last that was run."""


class NativeNetwork:
    def __init__(self, network: Network, kernels: Kernels) -> None:
        self.network, self.kernels = network, kernels
        stacks = (network.prelude, network.core, network.coda)
        layers = [layer for stack in stacks for layer in stack.layers]
        tables = [network.value_tables.get(number) for number in range(len(layers))]
        filled = map(_layer_fields, layers, tables)
        self._layers = (LayerFields * max(1, len(layers)))(*filled)
        self._model = _model_fields(network, self._layers)
        self._products = max((_products(layer) for layer in layers), default=0)
        self._scratch: dict[int, Tensor] = {}
        self._widths = (network.config.width, network.config.core_block.width)

    def takes(self, work: Work) -> bool:
        return 0 < work.tokens <= MOST_TOKENS

    def begin(self, work: Work, cache: Cache) -> Tensor:
        drive = self._empty(work.tokens, self._widths[1])
        self._run(work, cache, drive=drive, state=torch.empty_like(drive), begins=True)
        return drive

    def loop(self, h: Tensor, drive: Tensor, work: Work, cache: Cache, loops: range) -> Tensor:
        if not self._model.core:
            return drive
        h = _copy(h)
        self._run(work, cache, drive=drive.contiguous(), state=h, loops=loops)
        return h

    def read(self, h: Tensor, work: Work, cache: Cache) -> Tensor:
        x = self._empty(work.tokens, self._widths[0])
        self._run(work, cache, state=h.contiguous(), x=x, reads=True)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.kernels.multiply(self.network.head, x)

    def all_at_once(
        self,
        work: Work,
        cache: Cache,
        loops: range,
        depth: Depth | None,
        predict: Sequence[int],
        state: Tensor | None = None,
        drive: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Logits of the tokens to predict from, states, drive, and how often each token looped in
        the end. The tokens begin here unless their drive is given."""
        shape = (work.tokens, self._widths[1])
        if not self._model.core:
            loops, depth = range(1, 1), None
        h = self._empty(*shape).zero_() if state is None else _copy(state)
        given = self._empty(*shape) if drive is None else drive.contiguous()
        logits = self._empty(len(predict), self.network.config.vocab_size)
        ran = self._run(
            work,
            cache,
            drive=given,
            state=h,
            loops=loops,
            depth=depth,
            begins=drive is None,
            reads=len(predict) > 0,
            predict=predict,
            logits=logits,
        )
        return logits, h, given, ran

    def _run(
        self,
        work: Work,
        cache: Cache,
        *,
        drive: Tensor | None = None,
        state: Tensor | None = None,
        x: Tensor | None = None,
        loops: range = range(0),
        depth: Depth | None = None,
        begins: bool = False,
        reads: bool = False,
        predict: Sequence[int] = (),
        logits: Tensor | None = None,
    ) -> list[int]:
        threads = threads_for(self._products * work.tokens)
        ids, rows, positions = numbers(work.ids), numbers(work.rows), numbers(work.positions)
        slots, wanted = numbers(map(cache.policy.slot, loops)), numbers(predict)
        x = self._empty(work.tokens, self._widths[0]) if x is None else x
        limits = settled = least = ran = index = None
        if depth is not None:
            limits, settled = (numbers(work.each(n)) for n in (depth.limits, depth.settled))
            ran, index = (numbers([0] * work.tokens) for _ in range(2))
            if any(depth.least_changes):
                least = array("f", work.each(depth.least_changes))
        outer, core = cache.outer, cache.core
        fields = PassFields(
            work.tokens,
            *map(address, (ids, rows, positions, outer, core)),
            *outer.stride()[:2],
            *core.stride()[:2],
            begins,
            reads,
            len(loops),
            address(slots),
            loops.start - 1,
            *map(address, (limits, settled, least, ran, index, drive, state, x)),
            len(predict),
            *map(address, (wanted, logits, self._room(threads))),
            threads,
        )
        self.kernels.run(self._model, fields)
        return [] if ran is None else ran.tolist()

    def _room(self, threads: int) -> Tensor:
        if threads not in self._scratch:
            self._scratch[threads] = self.kernels.scratch(self._model, MOST_TOKENS, threads)
        return self._scratch[threads]

    @staticmethod
    def _empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="cpu")


def _copy(h: Tensor) -> Tensor:
    return h.clone(memory_format=torch.contiguous_format)


def _products(layer: Layer) -> int:
    return sum(one.stored.numel() for one in (layer.inner, layer.out, layer.fc, layer.proj))


def _layer_fields(layer: Layer, values: Tensor | None) -> LayerFields:
    head_dim = layer.shape.head_dim
    after = (None, None) if layer.after is None else layer.after
    return LayerFields(
        *map(matrix_fields, (layer.inner, layer.out, layer.fc, layer.proj)),
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
    )
