"""Smaller weights for decoding: a token reads every weight once, so bytes are time."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.infer.layers import Prepare, Product, float_product

Weights = Literal["float32", "int8", "bfloat16"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)


def int8_product(weight: Tensor) -> Product:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    whole = (weight / scale).round().to(torch.int8).contiguous()
    scales = scale[:, 0].bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), whole, scales).float()


def bfloat16_product(weight: Tensor) -> Product:
    weight = weight.bfloat16().contiguous()
    return lambda x: F.linear(x.bfloat16(), weight).float()


def stored_bytes(weight: Tensor, weights: Weights) -> int:
    """What is left of a weight [out, in]."""
    if weights == "int8":
        return weight.numel() + 2 * len(weight)
    return weight.numel() * (2 if weights == "bfloat16" else 4)


PREPARATIONS: dict[Weights, Prepare] = {
    "float32": float_product,
    "int8": int8_product,
    "bfloat16": bfloat16_product,
}
