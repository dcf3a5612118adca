"""Weight matrices as decoding holds them: a token reads every weight once, so bytes are time.

`float32`   as they are
`int8`      every row in 8 bits with a scale of its own; what it is multiplied with stays float32
`bfloat16`  half the memory, the same range, 8 bits of mantissa; the products are bfloat16's too

The products here are PyTorch's, for which 8-bit weights are first spread out to floats; those of a
few tokens are left to C++ (see `native`) where it can be had.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

Weights = Literal["float32", "int8", "bfloat16"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
LARGEST = 127
CACHE_LINE = 64


class Matrix(ABC):
    """W [out, in]."""

    stored: Tensor
    scale: Tensor | None = None
    """One for each row."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x W^T, from [N, in] to [N, out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T."""
        return self(x).add_(residual)


class FloatMatrix(Matrix):
    def __init__(self, weight: Tensor) -> None:
        self.stored = aligned(weight)
        self.transposed = self.stored.t()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(residual, x, self.transposed)


class Int8Matrix(Matrix):
    def __init__(self, weight: Tensor) -> None:
        self.scale = (weight.abs().amax(1).clamp(min=1e-30) / LARGEST).contiguous()
        self.stored = (weight / self.scale[:, None]).round().to(torch.int8).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        return torch.mm(x, self.stored.to(x.dtype).t()).mul_(self.scale)


class BFloat16Matrix(Matrix):
    def __init__(self, weight: Tensor) -> None:
        self.stored = weight.bfloat16().contiguous()
        self.transposed = self.stored.t()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x.bfloat16(), self.transposed).float()


KINDS = {"float32": FloatMatrix, "int8": Int8Matrix, "bfloat16": BFloat16Matrix}


def matrix(weight: Tensor, weights: Weights) -> Matrix:
    """A weight, detached, in the form asked for."""
    return KINDS[weights](weight.detach().float())


def in_8_bits(one: Matrix) -> Matrix:
    return Int8Matrix(one.stored)


def aligned(weight: Tensor) -> Tensor:
    """Contiguous, and where lines of the cache begin: files are mapped to any address, and reading
    across two lines takes twice as long."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % CACHE_LINE == 0 else weight.clone()
