"""The structures of a model in `layer.h` and `pass.cpp`, field by field: addresses and numbers.

Whoever fills one keeps the tensors it points to.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from ctypes import c_float, c_int32, c_int64, c_void_p

from torch import Tensor


def address(data: Tensor | array | None) -> int:
    if data is None:
        return 0
    return data.buffer_info()[0] if isinstance(data, array) else data.data_ptr()


def numbers(values: Iterable[int]) -> array:
    return array("q", values)


def _named(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class MatrixFields(ctypes.Structure):
    _fields_ = (*_named(c_void_p, "data scale"), *_named(c_int64, "out in_"))


class LayerFields(ctypes.Structure):
    _fields_ = (
        *_named(MatrixFields, "inner outer fc proj"),
        *_named(c_void_p, "after_attention after_mlp values"),
        *_named(c_float, "norm_floor qk_floor score_scale"),
        *_named(c_int32, "heads kv_heads head_dim gated_mlp"),
    )


class ModelFields(ctypes.Structure):
    _fields_ = (
        *_named(c_void_p, "layers"),
        *_named(c_int64, "prelude core coda width state_width context"),
        *_named(c_void_p, "embedding outer_phases core_phases prelude_norm final_norm"),
        *_named(c_float, "norm_floor"),
        *_named(MatrixFields, "into transition"),
        *_named(c_void_p, "decay"),
        *_named(MatrixFields, "readout head"),
        *_named(c_void_p, "unembedding"),
        *_named(c_int64, "compared"),
    )
