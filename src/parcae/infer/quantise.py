"""Weight matrices as decoding holds them: a token reads every weight once, so bytes are time.

`float32`   as they are
`int8`      every row in 8 bits with a scale of its own; what it is multiplied with stays float32
`bfloat16`  half the memory, the same range, 8 bits of mantissa; the products are bfloat16's too

With kernels (see `native`) passes of a few tokens are multiplied there; others by PyTorch, where
8-bit weights are first spread out to floats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from parcae.infer.native.kernels import MOST_TOKENS, Kernels, MatrixFields

Weights = Literal["float32", "int8", "bfloat16"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
LARGEST = 127


class Matrix(ABC):
    """W [out, in]."""

    stored: Tensor
    fields: MatrixFields
    """Where the C++ layers find it."""

    def __init__(self, kernels: Kernels | None) -> None:
        self.kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T, from [N, in] to [N, out]."""
        if self.kernels is not None and len(x) <= MOST_TOKENS:
            return self.kernels.multiply(self.fields, x)
        return self.product(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T."""
        if self.kernels is not None and len(x) <= MOST_TOKENS:
            return self.kernels.multiply(self.fields, x, residual)
        return self.product(x).add_(residual)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """By PyTorch."""


class FloatMatrix(Matrix):
    def __init__(self, weight: Tensor, kernels: Kernels | None) -> None:
        super().__init__(kernels)
        self.stored = weight.contiguous()
        self.transposed = self.stored.t()
        self.fields = MatrixFields(self.stored.data_ptr(), None, *weight.shape)

    def product(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.kernels is not None and len(x) <= MOST_TOKENS:
            return super().add_to(residual, x)
        return torch.addmm(residual, x, self.transposed)


class Int8Matrix(Matrix):
    def __init__(self, weight: Tensor, kernels: Kernels | None) -> None:
        super().__init__(kernels)
        self.scale = (weight.abs().amax(1).clamp(min=1e-30) / LARGEST).contiguous()
        self.stored = (weight / self.scale[:, None]).round().to(torch.int8).contiguous()
        self.fields = MatrixFields(self.stored.data_ptr(), self.scale.data_ptr(), *weight.shape)

    def product(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.stored.to(x.dtype).t()).mul_(self.scale)


class BFloat16Matrix(Matrix):
    def __init__(self, weight: Tensor) -> None:
        super().__init__(None)
        self.stored = weight.bfloat16().contiguous()
        self.transposed = self.stored.t()

    def product(self, x: Tensor) -> Tensor:
        return torch.mm(x.bfloat16(), self.transposed).float()


def matrix(weight: Tensor, weights: Weights, kernels: Kernels | None = None) -> Matrix:
    """A weight, detached, in the form asked for."""
    weight = weight.detach().float()
    if weights == "bfloat16":
        return BFloat16Matrix(weight)
    return (FloatMatrix if weights == "float32" else Int8Matrix)(weight, kernels)
