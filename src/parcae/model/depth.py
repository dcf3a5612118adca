"""How many loops a sequence gets: pure functions of a configuration and a generator.

A sequence with T loops runs the first n = T - k without gradient and the last k with it. The
samplers, with mu the mean and mu_bwd the gradient loops of `LoopConfig`:

    poisson         T ~ Poisson(mu), at least 1          k = min(T, mu_bwd)    the paper's
    poisson-full    T ~ Poisson(mu), at least 1          k = T                 no truncation
    fixed           T = mu                               k = min(T, mu_bwd)
    poisson-fill    n ~ Poisson(mu - mu_bwd)             k = mu_bwd            the older scheme
    lognormal-fill  n ~ Poisson(e^tau) + 1,              k = mu_bwd            Huginn's
                    tau ~ N(log(mu - mu_bwd) - s^2/2, s), s = 1/2
    release-per-batch  n ~ Poisson(mu), at least 1       k = min(n, mu_bwd)    a defect, see below

`release-per-batch` is what the authors' code draws for a micro-batch, with draw_per =
"micro-batch": the k loops with gradient come after all n instead of being the last of them. It
trains at about mu + mu_bwd loops, and never at one. It reproduces and continues their models.

Others are registered with `parcae.register_sampler`; they return `Depths`, or the loops of each
sequence, of which the last mu_bwd then have gradient.

`sample_rows` keys every draw by (seed, step, global row), so that one process and many train on
the same depths.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from parcae.config import LOGNORMAL_SIGMA, LoopConfig
from parcae.registry import SAMPLERS
from parcae.rng import keyed_generator


@dataclass(frozen=True)
class Depths:
    """For each sequence its number of loops, and how many of the last ones have gradient."""

    loops: tuple[int, ...]
    gradient_loops: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.loops) != len(self.gradient_loops):
            raise ValueError("depths: loops and gradient_loops must have one entry per sequence.")
        for loops, grad_loops in zip(self.loops, self.gradient_loops, strict=True):
            if loops < 1:
                raise ValueError(f"depths: {loops} loops. Every sequence needs at least one.")
            if not 1 <= grad_loops <= loops:
                raise ValueError(
                    f"depths: {grad_loops} gradient loops of {loops}. Use between 1 and {loops}."
                )

    @classmethod
    def truncated(cls, loops: Iterable[int], backprop_loops: int) -> Depths:
        """Gradient in the last `backprop_loops` loops of each sequence, or in all it has."""
        loops = tuple(loops)
        return cls(loops, tuple(min(t, backprop_loops) for t in loops))

    @property
    def no_grad_loops(self) -> tuple[int, ...]:
        """How many loops of each sequence run without gradient."""
        return tuple(t - k for t, k in zip(self.loops, self.gradient_loops, strict=True))

    def __len__(self) -> int:
        return len(self.loops)


@dataclass(frozen=True)
class Schedule:
    """Rows sorted by depth, deepest first: each loop then runs on a prefix of the batch."""

    order: tuple[int, ...]
    """order[i] is the caller's row that is sorted to index i."""
    depths: Depths
    """The depths in that order."""
    no_grad_rows: tuple[int, ...]
    """How many leading rows take part in each loop without gradient; non-increasing."""
    grad_rows: tuple[int, ...]
    """The same for the loops with gradient."""

    @classmethod
    def of(cls, depths: Depths) -> Schedule:
        order = sorted(range(len(depths)), key=lambda row: -depths.loops[row])  # stable
        ordered = Depths(
            tuple(depths.loops[row] for row in order),
            tuple(depths.gradient_loops[row] for row in order),
        )
        no_grad_loops, grad_loops = ordered.no_grad_loops, ordered.gradient_loops
        if not (_is_non_increasing(no_grad_loops) and _is_non_increasing(grad_loops)):
            raise ValueError(
                "depths: a sequence with more loops must have at least as many of either kind, "
                "with and without gradient. Use Depths.truncated, or equal gradient_loops."
            )
        return cls(tuple(order), ordered, _active_rows(no_grad_loops), _active_rows(grad_loops))

    @property
    def all_loops(self) -> tuple[int, ...]:
        """How many leading rows take part in each loop, where no gradient is computed at all."""
        return _active_rows(self.depths.loops)

    @property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(len(self.order)))


def _is_non_increasing(values: Sequence[int]) -> bool:
    return all(before >= after for before, after in pairwise(values))


def _active_rows(loops: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(t > done for t in loops) for done in range(max(loops, default=0)))


def as_depths(value: int | Sequence[int] | Tensor | Depths, rows: int, loop: LoopConfig) -> Depths:
    """`Depths` from what callers may pass: a number, one per sequence, or `Depths`; checked."""
    if isinstance(value, Depths):
        depths = value
    else:
        backprop = 1 << 62 if loop.sampler == "poisson-full" else loop.gradient_loops
        depths = Depths.truncated(_loop_counts(value, rows), backprop)
    if len(depths) != rows:
        raise ValueError(f"loops: {len(depths)} given for {rows} sequences. Give one for each.")
    return depths


def check_loops(value: object) -> int:
    """Check one number of loops and return it as an int."""
    if not _is_whole(value):
        raise TypeError(f"loops: {value!r} is not a whole number of loops.")
    loops = operator.index(value)  # pyright: ignore[reportArgumentType]
    if loops < 1:
        raise ValueError(f"loops: {loops}. Every sequence needs at least one.")
    return loops


def _loop_counts(value: object, rows: int) -> list[int]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"loops: whole numbers are needed, not {value.dtype}.")
        if value.ndim > 1:
            raise ValueError(f"loops: one per sequence is needed, not shape {[*value.shape]}.")
    if hasattr(value, "tolist"):  # tensors and numpy's arrays and numbers
        value = value.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if _is_whole(value):
        return [operator.index(value)] * rows  # pyright: ignore[reportArgumentType]
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"loops: {value!r}. Give a number of loops, or one per sequence.")
    counts = list(value)
    for count in counts:
        if not _is_whole(count):
            raise TypeError(f"loops: {count!r} is not a whole number of loops.")
    return [operator.index(count) for count in counts]


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def sample(loop: LoopConfig, rows: int, generator: torch.Generator, step: int = 0) -> Depths:
    """Depths for `rows` sequences from one generator."""
    if loop.draw_per == "micro-batch":
        shared = _draw(loop, 1, generator, step)
        return Depths(shared.loops * rows, shared.gradient_loops * rows)
    return _draw(loop, rows, generator, step)


def sample_rows(loop: LoopConfig, seed: int, step: int, rows: Sequence[int]) -> Depths:
    """Depths for the given global rows of an optimiser step, on whichever process they are.

    With `draw_per = "micro-batch"` the first row of the micro-batch draws for all of it.
    """
    drawing = rows[:1] if loop.draw_per == "micro-batch" else rows
    drawn = [_draw(loop, 1, keyed_generator(seed, step, row, "depth"), step) for row in drawing]
    if loop.draw_per == "micro-batch":
        drawn = drawn * len(rows)
    return Depths(
        tuple(d.loops[0] for d in drawn),
        tuple(d.gradient_loops[0] for d in drawn),
    )


def _draw(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    if loop.is_fixed_depth:
        return Depths((1,) * rows, (1,) * rows)
    return as_depths(SAMPLERS[loop.sampler](loop, rows, generator, step), rows, loop)


def poisson(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    return Depths.truncated(_poisson_loops(loop, rows, generator, step), loop.gradient_loops)


def poisson_full(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    loops = _poisson_loops(loop, rows, generator, step)
    return Depths.truncated(loops, max(loops))


def fixed(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    return Depths.truncated([max(1, round(loop.mean_at(step)))] * rows, loop.gradient_loops)


def poisson_fill(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    rates = torch.full((rows,), loop.mean_at(step) - loop.gradient_loops)
    return _filled(_poisson(rates, generator), loop.gradient_loops)


def lognormal_fill(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    center = math.log(loop.mean_at(step) - loop.gradient_loops) - LOGNORMAL_SIGMA**2 / 2
    rates = (center + LOGNORMAL_SIGMA * torch.randn(rows, generator=generator)).exp()
    return _filled(_poisson(rates, generator) + 1, loop.gradient_loops)


def release_per_batch(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> Depths:
    no_grad_loops = _poisson_loops(loop, rows, generator, step)
    gradient_loops = tuple(min(n, loop.gradient_loops) for n in no_grad_loops)
    total = (n + k for n, k in zip(no_grad_loops, gradient_loops, strict=True))
    return Depths(tuple(total), gradient_loops)


def _poisson_loops(loop: LoopConfig, rows: int, generator: torch.Generator, step: int) -> list[int]:
    rates = torch.full((rows,), loop.mean_at(step))
    return _poisson(rates, generator).clamp(min=1).tolist()


def _filled(no_grad_loops: Tensor, gradient_loops: int) -> Depths:
    total = (no_grad_loops + gradient_loops).tolist()
    return Depths(tuple(total), (gradient_loops,) * len(total))


def _poisson(rates: Tensor, generator: torch.Generator) -> Tensor:
    return torch.poisson(rates.float(), generator=generator).long()
