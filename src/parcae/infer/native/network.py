"""A whole pass for a few tokens on a CPU, from ids to logits, in one call of C++."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parcae.infer.batch import Batch
from parcae.infer.cache import Cache
from parcae.infer.exit import ExitRule, compared_tokens
from parcae.infer.layers import Layer
from parcae.infer.native.kernels import (
    MAX_TOKENS,
    Kernels,
    LayerFields,
    MatrixFields,
    ModelFields,
    address,
    int64_array,
    thread_count,
)

if TYPE_CHECKING:
    from parcae.infer.network import LinearMix, Network

SUPPORTED_EXITS = ("budget", "kl", "state")
"""The exit rules that C++ implements."""


class NativeNetwork:
    def __init__(self, network: Network, mix: LinearMix, kernels: Kernels) -> None:
        self.network, self.kernels = network, kernels
        stacks = (network.prelude, network.core, network.coda)
        layers = [layer for stack in stacks for layer in stack.layers]
        tables = [network.value_tables.get(number) for number in range(len(layers))]
        self._layers = (LayerFields * max(1, len(layers)))(*map(_layer_fields, layers, tables))
        self._model = _model_fields(network, mix, self._layers)
        sizes = [sum(matrix.stored.numel() for matrix in layer.matrices) for layer in layers]
        self._largest_layer = max(sizes, default=0)
        self._scratch: dict[int, Tensor] = {}

    def supports(self, batch: Batch, exits: Sequence[ExitRule | None] | None) -> bool:
        """Whether C++ can run this pass: few tokens, and no exit rule that it does not have."""
        if not 0 < len(batch) <= MAX_TOKENS:
            return False
        return all(rule is None or rule.name in SUPPORTED_EXITS for rule in exits or ())

    def forward(
        self,
        batch: Batch,
        cache: Cache,
        max_loops: Sequence[int],
        exits: Sequence[ExitRule | None] | None,
        predict: Sequence[int],
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Logits of the tokens in `predict`, final states [N, d_h], and the loops of each span."""
        loops = range(1, max(max_loops) + 1) if self._model.core else range(0)
        has_depths = bool(loops) and (exits is not None or len(set(max_loops)) > 1)
        rules = [None] * len(max_loops) if exits is None else exits
        limits, min_changes, watched = _stopping(max_loops, rules) if has_depths else ([], [], [])
        wanted = range(len(batch)) if any(watched) else predict
        logits = _empty(len(wanted), self.network.config.vocab_size)
        state = _empty(len(batch), self.network.config.core_block.width)
        threads = thread_count(self._largest_layer * len(batch))
        tokens = [int64_array(values) for values in (batch.ids, batch.rows, batch.positions)]
        slots, predicted = int64_array(map(cache.policy.slot, loops)), int64_array(wanted)
        limit = settled = min_change = order = ran = index = None
        watched_count = 0
        if has_depths:
            limit, settled = (int64_array(batch.expand(x)) for x in (limits, max_loops))
            is_watched = batch.expand(watched)
            watched_count = sum(is_watched)
            order = int64_array(sorted(range(len(batch)), key=lambda token: not is_watched[token]))
            ran, index = int64_array(order), int64_array(order)
            if any(min_changes):
                min_change = array("f", batch.expand(min_changes))
        fields = (
            len(batch),
            *map(address, tokens),
            *cache.addresses,
            len(loops),
            *map(address, (slots, limit, settled, min_change)),
            watched_count,
            *map(address, (order, ran, index, state)),
            len(predicted),
            *map(address, (predicted, logits, self._scratch_for(threads))),
            threads,
        )
        self.kernels.run(self._model, int64_array(fields))
        if wanted != predict:
            logits = logits[list(predict)]
        if ran is None:
            return logits, state, list(max_loops)
        return logits, state, [ran[token] for token in batch.last_indices]

    def _scratch_for(self, threads: int) -> Tensor:
        if threads not in self._scratch:
            self._scratch[threads] = self.kernels.scratch(self._model, MAX_TOKENS, threads)
        return self._scratch[threads]


def _stopping(
    max_loops: Sequence[int], exits: Sequence[ExitRule | None]
) -> tuple[list[int], list[float], list[bool]]:
    """For each span: its largest number of loops; the change below which it stops, 0 for never;
    and whether that is a change of predictions, which need two loops to compare."""
    limits, min_changes, watched = [], [], []
    for limit, rule in zip(max_loops, exits, strict=True):
        min_change = 0.0
        if rule is not None and rule.name == "budget":
            limit = min(limit, int(rule.threshold))
        elif rule is not None:
            min_change = rule.threshold
        limits.append(limit)
        min_changes.append(min_change)
        watched.append(rule is not None and rule.name == "kl" and min_change > 0 and limit > 1)
    return limits, min_changes, watched


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _layer_fields(layer: Layer, value_table: Tensor | None) -> LayerFields:
    head_dim = layer.shape.head_dim
    after = (None, None) if layer.after is None else layer.after
    return LayerFields(
        *map(MatrixFields.of, layer.matrices),
        *(None if norm is None else address(norm.scale) for norm in after),
        address(value_table),
        float(layer.norm.floor) ** 2,
        -1.0 if layer.qk_norm is None else float(layer.qk_norm.floor) ** 2,
        1 / math.sqrt(head_dim) if layer.qk_norm is None else math.sqrt(head_dim),
        layer.shape.heads,
        layer.shape.kv_heads,
        head_dim,
        layer.gated_mlp,
    )


def _model_fields(network: Network, mix: LinearMix, layers: ctypes.Array) -> ModelFields:
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
        MatrixFields.of(mix.into),
        MatrixFields.of(mix.transition),
        address(mix.decay),
        MatrixFields.of(network.readout),
        MatrixFields.of(network.head),
        address(network.unembedding),
        compared_tokens(config.vocab_size),
    )
