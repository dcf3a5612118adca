"""Smaller weights for decoding: a token reads every weight once, so bytes are time."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.infer.layers import Prepare, Product, float_product

Weights = Literal["float32", "int8", "bfloat16"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)


VECTOR = 32
"""The int8 kernel reads its inputs in whole vectors, at most this wide, and does not check: other
widths give wrong numbers or end the process."""


def int8_product(weight: Tensor) -> Product:
    scales = (weight.float().abs().amax(1).clamp(min=1e-12) / 127).bfloat16()
    whole = (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    missing = -whole.shape[1] % VECTOR
    whole = F.pad(whole, (0, missing)).contiguous()

    def product(x: Tensor) -> Tensor:
        x = F.pad(x, (0, missing)) if missing else x
        x = x.bfloat16().contiguous()
        return torch.ops.aten._weight_int8pack_mm(x, whole, scales).float()

    return product


def bfloat16_product(weight: Tensor) -> Product:
    weight = weight.bfloat16().contiguous()
    return lambda x: F.linear(x.bfloat16(), weight).float()


PREPARATIONS: dict[Weights, Prepare] = {
    "float32": float_product,
    "int8": int8_product,
    "bfloat16": bfloat16_product,
}
