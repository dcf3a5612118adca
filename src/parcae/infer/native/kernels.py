"""The functions of the C++ library, typed."""

from __future__ import annotations

from array import array
from ctypes import POINTER, byref, c_int64, c_void_p

import torch
from torch import Tensor

from parcae.infer.native.build import library
from parcae.infer.native.fields import MatrixFields, ModelFields, address
from parcae.infer.quantise import Matrix

WORTH_SHARING = 1 << 18
"""Products of weights and tokens that are fewer are done before a second thread has started."""
MOST_TOKENS = 32
"""Beyond so many tokens in a pass the large products of PyTorch are faster."""


class Kernels:
    """Making one builds the library, or says why it cannot."""

    def __init__(self) -> None:
        found = library()
        self._pass = found.parcae_pass
        self._pass.argtypes = (POINTER(ModelFields), c_void_p)
        self._pass.restype = None
        self._scratch = found.parcae_scratch
        self._scratch.argtypes = (POINTER(ModelFields), c_int64, c_int64)
        self._scratch.restype = c_int64
        self._multiply = found.parcae_multiply
        self._multiply.argtypes = (POINTER(MatrixFields), c_void_p, c_int64, c_void_p, c_int64)
        self._multiply.restype = None

    def run(self, model: ModelFields, fields: array) -> None:
        """The fields of a `Pass`, in their order."""
        self._pass(byref(model), address(fields))

    def scratch(self, model: ModelFields, tokens: int, threads: int) -> Tensor:
        size = self._scratch(byref(model), tokens, threads)
        return torch.empty(size, dtype=torch.float32, device="cpu")

    def multiply(self, matrix: Matrix, x: Tensor) -> Tensor:
        """x W^T for a few tokens."""
        x, fields = x.contiguous(), matrix_fields(matrix)
        y = x.new_empty(len(x), fields.out)
        threads = threads_for(fields.out * fields.in_ * len(x))
        self._multiply(byref(fields), x.data_ptr(), len(x), y.data_ptr(), threads)
        return y


def threads_for(products: int) -> int:
    return 1 if products < WORTH_SHARING else torch.get_num_threads()


def matrix_fields(matrix: Matrix | None) -> MatrixFields:
    if matrix is None:
        return MatrixFields()
    return MatrixFields(address(matrix.stored), address(matrix.scale), *matrix.stored.shape)
