"""How many loops the sequences of a call get in transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

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


def given_depths(
    num_loops: int | Sequence[int] | Tensor, rows: int, config: ParcaeConfig
) -> int | Depths:
    """One number for all sequences, or `Depths` where they have different ones."""
    if isinstance(num_loops, Tensor):
        num_loops = cast("int | list[int]", num_loops.tolist())
    if not isinstance(num_loops, int):
        if len(num_loops) != rows:
            raise ValueError(f"num_loops: {len(num_loops)} given for {rows} sequences.")
        if len(set(num_loops)) > 1:
            return Depths.truncated([int(n) for n in num_loops], config.gradient_loops)
        num_loops = int(num_loops[0])
    if num_loops < 1:
        raise ValueError(f"num_loops: {num_loops}; at least one is needed.")
    return num_loops


def drawn_depths(rows: int, config: ParcaeConfig) -> Depths:
    """Numbers for training, drawn from PyTorch's generator."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
    drawn = 1 if config.draw_per == "micro-batch" else rows
    depths = SAMPLER_FUNCTIONS[config.sampler](config, drawn, generator, 0)
    if drawn < rows:
        return Depths(depths.loops * rows, depths.gradient_loops * rows)
    return depths
