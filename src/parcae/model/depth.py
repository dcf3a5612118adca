"""How many loops a sequence gets: pure functions of a configuration and a generator.

A sequence with T loops runs the first n = T - k without gradient and the last k with it. The
samplers, with mu the mean and mu_bwd the gradient loops of `LoopConfig`:

    poisson         T ~ Poisson(mu), at least 1          k = min(T, mu_bwd)    the paper's
    poisson-full    T ~ Poisson(mu), at least 1          k = T                 no truncation
    fixed           T = mu                               k = min(T, mu_bwd)
    poisson-fill    n ~ Poisson(mu - mu_bwd)             k = mu_bwd            the older scheme
    lognormal-fill  n ~ Poisson(e^tau) + 1,              k = mu_bwd            Huginn's
                    tau ~ N(log(mu - mu_bwd) - s^2/2, s), s = 1/2

`sample_rows` keys every draw by (seed, step, global row), so that one process and many train on
the same depths.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parcae.config import LOGNORMAL_SIGMA, LoopConfig


@dataclass(frozen=True)
class Depths:
    """For each sequence its loops, and how many of the last ones carry gradient."""

    loops: tuple[int, ...]
    gradient_loops: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.loops) != len(self.gradient_loops):
            raise ValueError("depths: loops and gradient_loops must have one entry per sequence.")
        for loops, carried in zip(self.loops, self.gradient_loops, strict=True):
            if loops < 1:
                raise ValueError(f"depths: {loops} loops. Every sequence needs at least one.")
            if not 1 <= carried <= loops:
                raise ValueError(
                    f"depths: {carried} gradient loops of {loops}. Use between 1 and {loops}."
                )

    @classmethod
    def truncated(cls, loops: Iterable[int], backprop_loops: int) -> Depths:
        """The last `backprop_loops` loops of each sequence carry gradient, or all it has."""
        loops = tuple(loops)
        return cls(loops, tuple(min(t, backprop_loops) for t in loops))

    @property
    def free_loops(self) -> tuple[int, ...]:
        """The loops of each sequence that run without gradient."""
        return tuple(t - k for t, k in zip(self.loops, self.gradient_loops, strict=True))

    def __len__(self) -> int:
        return len(self.loops)


@dataclass(frozen=True)
class Schedule:
    """Rows sorted by depth, deepest first: each loop then runs on a prefix of the batch."""

    order: tuple[int, ...]
    """order[i] is the caller's row that stands at place i."""
    depths: Depths
    """The depths in that order."""
    free: tuple[int, ...]
    """Rows that still loop, for each loop without gradient; never growing."""
    carried: tuple[int, ...]
    """The same for the loops with gradient."""

    @classmethod
    def of(cls, depths: Depths) -> Schedule:
        order = sorted(range(len(depths)), key=lambda row: -depths.loops[row])  # stable
        ordered = Depths(
            tuple(depths.loops[row] for row in order),
            tuple(depths.gradient_loops[row] for row in order),
        )
        free, carried = ordered.free_loops, ordered.gradient_loops
        if sorted(free, reverse=True) != [*free] or sorted(carried, reverse=True) != [*carried]:
            raise ValueError(
                "depths: a sequence with more loops must have at least as many of either kind, "
                "with and without gradient. Use Depths.truncated, or equal gradient_loops."
            )
        return cls(tuple(order), ordered, _active_rows(free), _active_rows(carried))

    @property
    def all_loops(self) -> tuple[int, ...]:
        """Rows that still loop, for each loop, where no gradient is wanted at all."""
        return _active_rows(self.depths.loops)

    @property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    @property
    def row_loops(self) -> int:
        """Loops over all rows: the work that is needed, and the work that is done."""
        return sum(self.depths.loops)


def _active_rows(loops: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(t > done for t in loops) for done in range(max(loops, default=0)))


def as_depths(value: int | Sequence[int] | Tensor | Depths, rows: int, loop: LoopConfig) -> Depths:
    """What a caller may pass as `depths`, checked: a number, one per sequence, or `Depths`."""
    if isinstance(value, Depths):
        depths = value
    else:
        backprop = 1 << 62 if loop.sampler == "poisson-full" else loop.gradient_loops
        depths = Depths.truncated(_loop_counts(value, rows), backprop)
    if len(depths) != rows:
        raise ValueError(f"depths: {len(depths)} given for {rows} sequences. Give one for each.")
    return depths


def check_depth(value: object) -> int:
    """One number of loops, the same for all sequences."""
    if not _is_whole(value):
        raise TypeError(f"depths: {value!r} is not a whole number of loops.")
    depth = operator.index(value)  # pyright: ignore[reportArgumentType]
    if depth < 1:
        raise ValueError(f"depths: {depth} loops. Every sequence needs at least one.")
    return depth


def _loop_counts(value: object, rows: int) -> list[int]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"depths: whole numbers are needed, not {value.dtype}.")
        if value.ndim > 1:
            raise ValueError(f"depths: one per sequence is needed, not shape {[*value.shape]}.")
    if hasattr(value, "tolist"):  # tensors and numpy's arrays and numbers
        value = value.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if _is_whole(value):
        return [operator.index(value)] * rows  # pyright: ignore[reportArgumentType]
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"depths: {value!r}. Give a number of loops, or one per sequence.")
    counts = list(value)
    for count in counts:
        if not _is_whole(count):
            raise TypeError(f"depths: {count!r} is not a whole number of loops.")
    return [operator.index(count) for count in counts]


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def sample(loop: LoopConfig, rows: int, generator: torch.Generator, step: int = 0) -> Depths:
    """Depths for `rows` sequences from one generator."""
    if loop.draw_per == "micro-batch":
        one = _draw(loop, 1, generator, step)
        return Depths(one.loops * rows, one.gradient_loops * rows)
    return _draw(loop, rows, generator, step)


def sample_rows(loop: LoopConfig, seed: int, step: int, rows: Sequence[int]) -> Depths:
    """Depths for the given global rows of an optimiser step, whoever holds them.

    With `draw_per = "micro-batch"` the first row of the micro-batch draws for all of it.
    """
    drawing = rows[:1] if loop.draw_per == "micro-batch" else rows
    drawn = [_draw(loop, 1, row_generator(seed, step, row, "depth"), step) for row in drawing]
    if loop.draw_per == "micro-batch":
        drawn = drawn * len(rows)
    return Depths(
        tuple(d.loops[0] for d in drawn),
        tuple(d.gradient_loops[0] for d in drawn),
    )


def row_generator(
    seed: int, step: int, row: int, purpose: str, device: str | torch.device = "cpu"
) -> torch.Generator:
    """A generator of its own for each (seed, step, global row) and purpose."""
    key = hashlib.blake2b(f"{seed}/{step}/{row}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little"))


def _draw(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    if loop.is_fixed_depth:
        return Depths((1,) * rows, (1,) * rows)
    mean, backprop = loop.mean_at(step), loop.gradient_loops
    if loop.sampler == "fixed":
        return Depths.truncated([max(1, round(mean))] * rows, backprop)
    if loop.sampler in ("poisson", "poisson-full"):
        loops = _poisson(torch.full((rows,), mean), generator).clamp(min=1).tolist()
        return Depths.truncated(loops, max(loops) if loop.sampler == "poisson-full" else backprop)
    rates = torch.full((rows,), mean - backprop)
    if loop.sampler == "lognormal-fill":
        center = math.log(mean - backprop) - LOGNORMAL_SIGMA**2 / 2
        noise = torch.randn(rows, generator=generator)
        rates = (center + LOGNORMAL_SIGMA * noise).exp()
    free = _poisson(rates, generator) + (loop.sampler == "lognormal-fill")
    return Depths(tuple((free + backprop).tolist()), (backprop,) * rows)


def _poisson(rates: Tensor, generator: torch.Generator) -> Tensor:
    return torch.poisson(rates.float(), generator=generator).long()
