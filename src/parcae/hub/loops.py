"""How many loops the sequences of a call get in transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parcae.model.depth import (
    Depths,
    fixed,
    lognormal_fill,
    poisson,
    poisson_fill,
    poisson_full,
    release_per_batch,
)

if TYPE_CHECKING:
    from parcae.hub.configuration_parcae import ParcaeConfig

SAMPLER_FUNCTIONS: dict[str, Callable[..., Depths]] = {
    "poisson": poisson,
    "poisson-full": poisson_full,
    "poisson-fill": poisson_fill,
    "lognormal-fill": lognormal_fill,
    "fixed": fixed,
    "release-per-batch": release_per_batch,
}


def whole_numbers(num_loops: Any) -> int | list[int]:
    """`num_loops` of a call as Python's numbers: of a tensor, a NumPy number or array, a list."""
    given = num_loops.tolist() if hasattr(num_loops, "tolist") else num_loops
    numbers = [given] if isinstance(given, int) else given
    if not isinstance(numbers, Sequence) or not numbers:
        raise ValueError(f"num_loops: {num_loops!r}; give a whole number, or one per sequence.")
    for number in numbers:
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"num_loops: {number!r}; it must be a whole number >= 1.")
    return given if isinstance(given, int) else [*numbers]


def given_depths(
    num_loops: int | Sequence[int] | Tensor, rows: int, config: ParcaeConfig
) -> int | Depths:
    """One number for all sequences, or `Depths` where they have different ones."""
    numbers = whole_numbers(num_loops)
    if isinstance(numbers, int):
        return numbers
    if len(numbers) != rows:
        raise ValueError(f"num_loops: {len(numbers)} given for {rows} sequences.")
    if len(set(numbers)) > 1:
        return Depths.truncated(numbers, config.gradient_loops)
    return numbers[0]


def drawn_depths(rows: int, config: ParcaeConfig) -> Depths:
    """Numbers for training, drawn from PyTorch's generator."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
    drawn = 1 if config.draw_per == "micro-batch" else rows
    depths = SAMPLER_FUNCTIONS[config.sampler](config, drawn, generator, 0)
    if drawn < rows:
        return Depths(depths.loops * rows, depths.gradient_loops * rows)
    return depths
