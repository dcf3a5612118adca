"""Storage formats of weight matrices. Decoding reads every weight once per token, so size is time.

`float32`   unchanged
`int8`      8 bits with one scale per row; products are computed with inputs rounded to 8 bits,
            with one scale per token, and are exact sums of integers
`bfloat16`  half the memory, 8 bits of mantissa; products are computed in bfloat16 too

These are PyTorch products, for which int8 weights are first converted to float32. With few tokens
on a CPU the C++ kernels (see `native`) multiply the integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

WeightDType = Literal["float32", "int8", "bfloat16"]
WEIGHT_DTYPES: tuple[WeightDType, ...] = get_args(WeightDType)
LARGEST = 127
CACHE_LINE = 64


class Matrix(ABC):
    """W [out, in]."""

    stored: Tensor
    scale: Tensor | None = None
    """One per row, for int8."""
    panels: Tensor | None = None
    """The same weights in the order in which the C++ kernels read them."""

    @property
    def tensors(self) -> list[Tensor]:
        """The weights in memory, once or twice."""
        return [self.stored] if self.panels is None else [self.stored, self.panels]

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
        integers, scale = quantise_inputs(x)
        return torch.mm(integers, self.stored.to(x.dtype).t()).mul_(scale).mul_(self.scale)


def quantise_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, in] as integers from -127 to 127, stored as floats, and each row's scale [N, 1]."""
    largest = x.abs().amax(1, keepdim=True)
    factor = LARGEST / largest
    factor = torch.where(factor.isfinite(), factor, 0.0)  # the smallest inputs count as 0
    return (x * factor).round(), largest / LARGEST


class BFloat16Matrix(Matrix):
    def __init__(self, weight: Tensor) -> None:
        self.stored = weight.bfloat16().contiguous()
        self.transposed = self.stored.t()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x.bfloat16(), self.transposed).float()


KINDS = {"float32": FloatMatrix, "int8": Int8Matrix, "bfloat16": BFloat16Matrix}


def matrix(weight: Tensor, weight_dtype: WeightDType) -> Matrix:
    """A weight, detached, in the given format."""
    return KINDS[weight_dtype](weight.detach().float())


def to_int8(matrix: Matrix) -> Matrix:
    """The int8 version of a float32 matrix."""
    return Int8Matrix(matrix.stored)


def aligned(weight: Tensor) -> Tensor:
    """Contiguous and aligned to cache lines: memory-mapped weights start at any address, and reads
    that cross a line take twice as long."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % CACHE_LINE == 0 else weight.clone()
