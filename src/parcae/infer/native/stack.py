"""A stack of layers that hands passes of a few tokens to the C++ layers, and others to PyTorch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parcae.infer.layers import Layer, Stack
from parcae.infer.native.kernels import (
    MOST_TOKENS,
    DepthFields,
    Kernels,
    LayerFields,
    MixFields,
    PassFields,
)
from parcae.infer.work import Work


class NativeStack(Stack):
    def __init__(self, layers: Sequence[Layer], kernels: Kernels, context: int) -> None:
        super().__init__(layers)
        self.kernels, self.context = kernels, context
        self._fields = (LayerFields * max(1, len(layers)))(*map(_fields, layers))
        self._scratch: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self,
        x: Tensor,
        phases: Tensor,
        values: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        work: Work,
    ) -> Tensor:
        if not self.takes(work):
            return super().__call__(x, phases, values, kept, work)
        return self.run(x, phases, values, kept, work)

    def takes(self, work: Work) -> bool:
        return work.tokens <= MOST_TOKENS and len(self.layers) > 0

    def run(
        self,
        x: Tensor,
        phases: Tensor,
        values: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        work: Work,
        mix: MixFields | None = None,
        drive: Tensor | None = None,
        loops: int = 1,
        depth: DepthFields | None = None,
    ) -> Tensor:
        """Through the layers; with `mix`, `loops` times, `kept` having parts for each time."""
        count = len(self.layers)
        x = x.clone(memory_format=torch.contiguous_format)
        at = PassFields(
            work.tokens,
            work.rows.data_ptr(),
            work.positions.data_ptr(),
            phases.data_ptr(),
            kept[0].stride(0),
        )
        self.kernels.layers(
            self._fields,
            count,
            at,
            x,
            _addresses(kept),
            _addresses(values),
            self._room(work.tokens),
            self.context,
            mix,
            drive,
            loops,
            depth,
        )
        return x

    def _room(self, tokens: int) -> Tensor:
        """Scratch for a pass; kept, as every loop wants the same."""
        key = (tokens, torch.get_num_threads())
        if key not in self._scratch:
            count = len(self.layers)
            self._scratch[key] = self.kernels.scratch(self._fields, count, tokens, self.context)
        return self._scratch[key]


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    kind = ctypes.c_void_p * len(tensors)
    return kind(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def _fields(layer: Layer) -> LayerFields:
    head_dim = layer.shape.head_dim
    after = (None, None) if layer.after is None else layer.after
    return LayerFields(
        layer.inner.fields,
        layer.out.fields,
        layer.fc.fields,
        layer.proj.fields,
        *(None if norm is None else norm.scale.data_ptr() for norm in after),
        float(layer.norm.floor) ** 2,
        -1.0 if layer.qk_norm is None else float(layer.qk_norm.floor) ** 2,
        1 / math.sqrt(head_dim) if layer.qk_norm is None else math.sqrt(head_dim),
        layer.shape.heads,
        layer.shape.kv_heads,
        head_dim,
        layer.gated_mlp,
    )
