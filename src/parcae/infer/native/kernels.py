"""The C++ layers as Python sees them: structures filled with addresses, and two calls.

Whoever makes a structure keeps the tensors it points to.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from parcae.infer.native.build import library

WORTH_SHARING = 1 << 18
"""Products of a matrix and tokens that are fewer are done before a second thread has started."""
MOST_TOKENS = 32
"""Beyond so many tokens in a pass the large products of PyTorch are faster."""


class MatrixFields(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("scale", c_void_p), ("out", c_int64), ("in_", c_int64))


class LayerFields(ctypes.Structure):
    _fields_ = (
        ("inner", MatrixFields),
        ("outer", MatrixFields),
        ("fc", MatrixFields),
        ("proj", MatrixFields),
        ("after_attention", c_void_p),
        ("after_mlp", c_void_p),
        ("norm_floor", c_float),
        ("qk_floor", c_float),
        ("score_scale", c_float),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("gated_mlp", c_int32),
    )


class PassFields(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("phases", c_void_p),
        ("row_stride", c_int64),
    )


class MixFields(ctypes.Structure):
    _fields_ = (("decay", c_void_p), ("transition", MatrixFields))


class DepthFields(ctypes.Structure):
    _fields_ = (
        ("limits", c_void_p),
        ("thresholds", c_void_p),
        ("done", c_void_p),
        ("index", c_void_p),
    )


class Kernels:
    """The library's functions, typed. Making one builds the library, or says why it cannot."""

    def __init__(self) -> None:
        found = library()
        self._layers = found.parcae_layers
        self._layers.argtypes = (
            POINTER(LayerFields),
            c_int64,
            POINTER(PassFields),
            POINTER(MixFields),
            POINTER(DepthFields),
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
        )
        self._layers.restype = None
        self._scratch = found.parcae_scratch
        self._scratch.argtypes = (POINTER(LayerFields), c_int64, c_int64, c_int64, c_int64)
        self._scratch.restype = c_int64
        self._multiply = found.parcae_multiply
        self._multiply.argtypes = (
            POINTER(MatrixFields),
            c_void_p,
            c_int64,
            c_void_p,
            c_int32,
            c_int64,
        )
        self._multiply.restype = None

    def multiply(self, matrix: MatrixFields, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x W^T, or residual + x W^T."""
        x = x.contiguous()
        y = x.new_empty(len(x), matrix.out) if residual is None else residual.clone()
        alone = matrix.out * matrix.in_ * len(x) < WORTH_SHARING
        self._multiply(
            byref(matrix),
            x.data_ptr(),
            len(x),
            y.data_ptr(),
            residual is not None,
            1 if alone else torch.get_num_threads(),
        )
        return y

    def scratch(self, layers: Any, count: int, tokens: int, context: int) -> Tensor:
        size = self._scratch(layers, count, tokens, context, torch.get_num_threads())
        return torch.empty(size, dtype=torch.float32, device="cpu")

    def layers(
        self,
        layers: Any,
        count: int,
        tokens: PassFields,
        x: Tensor,
        kept: Any,
        values: Any,
        scratch: Tensor,
        context: int,
        mix: MixFields | None = None,
        drive: Tensor | None = None,
        loops: int = 1,
        depth: DepthFields | None = None,
    ) -> None:
        """x in place, once, or `loops` times with the drive mixed in before each, unless `depth`
        lets a token stop."""
        self._layers(
            layers,
            count,
            byref(tokens),
            None if mix is None else byref(mix),
            None if depth is None else byref(depth),
            None if drive is None else drive.data_ptr(),
            loops,
            x.data_ptr(),
            kept,
            values,
            scratch.data_ptr(),
            context,
            torch.get_num_threads(),
        )
