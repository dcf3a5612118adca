"""A whole pass for a few tokens on a CPU, from ids to logits, in one call of C++."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from parcae.infer.batch import Batch, PassOutput
from parcae.infer.cache import Cache
from parcae.infer.exit import ExitRule, compared_tokens
from parcae.infer.layers import FoldedModel, Layer, LinearMix
from parcae.infer.native.kernels import (
    MAX_TOKENS,
    Kernels,
    LayerFields,
    ModelFields,
    PassFields,
    address,
    int64_array,
    thread_count,
)

SUPPORTED_EXITS = ("budget", "kl", "state")
"""The exit rules that C++ implements."""


class NativeNetwork:
    """Passes of a few tokens of a model whose injection is a `LinearMix`."""

    def __init__(self, model: FoldedModel, kernels: Kernels) -> None:
        self.model, self.kernels = model, kernels
        layers = model.layers
        tables = [model.value_tables.get(number) for number in range(len(layers))]
        fields = [_layer_fields(kernels, *pair) for pair in zip(layers, tables, strict=True)]
        self._layers = (LayerFields * max(1, len(layers)))(*fields)
        self._model = _model_fields(kernels, model, self._layers)
        sizes = [sum(matrix.stored.numel() for matrix in layer.matrices) for layer in layers]
        self._largest_layer = max(sizes, default=0)
        self._scratch: dict[int, Tensor] = {}

    def supports(self, batch: Batch, exits: Sequence[ExitRule | None] | None) -> bool:
        """Whether C++ can run this pass: few tokens, and no exit rule that it does not have."""
        if not 0 < len(batch) <= MAX_TOKENS:
            return False
        if exits is not None and any(exits) and len(batch) > len(batch.spans):
            return False
        return all(rule is None or rule.name in SUPPORTED_EXITS for rule in exits or ())

    def forward(
        self,
        batch: Batch,
        cache: Cache,
        max_loops: Sequence[int],
        exits: Sequence[ExitRule | None] | None = None,
        predict: Sequence[int] | None = None,
    ) -> PassOutput:
        """See `Network.forward`."""
        assert cache.dtype in (torch.float32, torch.bfloat16)
        predict = range(len(batch)) if predict is None else predict
        loops = range(1, max(max_loops) + 1) if self._model.core else range(0)
        has_depths = bool(loops) and (exits is not None or len(set(max_loops)) > 1)
        rules = [None] * len(max_loops) if exits is None else exits
        limits, min_changes, watched = _stopping(max_loops, rules) if has_depths else ([], [], [])
        wanted = range(len(batch)) if any(watched) else predict
        logits = _empty(len(wanted), self.model.config.vocab_size)
        state = _empty(len(batch), self.model.config.core_block.width)
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
        ids, rows, positions = map(address, tokens)
        outer, core, outer_layer, outer_row, core_layer, core_row = cache.addresses
        fields = PassFields(
            tokens=len(batch),
            ids=ids,
            rows=rows,
            positions=positions,
            outer=outer,
            core=core,
            cache_itemsize=cache.dtype.itemsize,
            outer_layer=outer_layer,
            outer_row=outer_row,
            core_layer=core_layer,
            core_row=core_row,
            loops=len(loops),
            slots=address(slots),
            limits=address(limit),
            settled=address(settled),
            min_change=address(min_change),
            watched=watched_count,
            order=address(order),
            ran=address(ran),
            active=address(index),
            state=address(state),
            predicted=len(predicted),
            predict=address(predicted),
            logits=address(logits),
            scratch=address(self._scratch_for(threads)),
            threads=threads,
        )
        self.kernels.run(self._model, fields)
        if wanted != predict:
            logits = logits[list(predict)]
        if ran is None:
            return PassOutput(logits, state, list(max_loops))
        return PassOutput(logits, state, [ran[token] for token in batch.last_indices])

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


def _layer_fields(kernels: Kernels, layer: Layer, value_table: Tensor | None) -> LayerFields:
    head_dim = layer.shape.head_dim
    after_attention, after_mlp = (None, None) if layer.after is None else layer.after
    return LayerFields(
        inner=kernels.fields(layer.inner),
        outer=kernels.fields(layer.out),
        fc=kernels.fields(layer.fc),
        proj=kernels.fields(layer.proj),
        norm_after_attention=None if after_attention is None else address(after_attention.scale),
        norm_after_mlp=None if after_mlp is None else address(after_mlp.scale),
        value_table=address(value_table),
        norm_floor=float(layer.norm.floor) ** 2,
        qk_floor=-1.0 if layer.qk_norm is None else float(layer.qk_norm.floor) ** 2,
        score_scale=1 / math.sqrt(head_dim) if layer.qk_norm is None else math.sqrt(head_dim),
        heads=layer.shape.heads,
        kv_heads=layer.shape.kv_heads,
        head_dim=head_dim,
        gated_mlp=layer.gated_mlp,
    )


def _model_fields(kernels: Kernels, model: FoldedModel, layers: ctypes.Array) -> ModelFields:
    config, layout, norm, mix = model.config, model.layout, model.prelude_norm, model.mix
    assert isinstance(mix, LinearMix)
    return ModelFields(
        layers=ctypes.addressof(layers),
        prelude=layout.prelude_layers,
        core=layout.core_layers,
        coda=layout.coda_layers,
        width=config.width,
        state_width=config.core_block.width,
        context=config.context_length,
        embedding=address(model.embedding),
        outer_phases=address(model.outer_phases),
        core_phases=address(model.core_phases),
        prelude_norm=None if norm is None else address(norm.scale),
        final_norm=address(model.final_norm.scale),
        norm_floor=float(model.final_norm.unit.floor) ** 2,
        into=kernels.fields(mix.into),
        transition=kernels.fields(mix.transition),
        decay=address(mix.decay),
        readout=kernels.fields(model.readout),
        head=kernels.fields(model.head),
        unembedding=address(model.unembedding),
        candidates=compared_tokens(config.vocab_size),
    )
