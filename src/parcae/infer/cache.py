"""The key-value cache, by (layer, loop), allocated ahead of use.

Looping T times gives T sets of keys and values in every core layer. At loop t a token attends to
the keys and values that earlier tokens wrote at loop t; one slot per loop computes exactly the
model and costs T times the memory. The other policies let loops share slots and are approximations:

    full        slot t for loop t                                exact
    last:K      slot t mod K: a token keeps its last K loops     loop t reads one of the last K
    first:K     slot min(t, K): loops from K on share one        they read the token's last loop
    shared      one slot for all loops, the same as last:1       every loop reads the last

Under every policy the tokens of one pass attend to each other loop by loop, so a prompt is read
exactly; only how later tokens attend to it is approximate.

The keys and values of a layer are stored as [row, position, key or value, head, channel]: a row is
one sequence, a token is contiguous, and copying a prefix is one copy. Attention is computed in the
dtype of the model: C++ converts keys and values in bfloat16 as it reads them, PyTorch converts the
rows of a layer before attention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from parcae.config import BlockShape, ConfigError, ModelConfig
from parcae.console import format_bytes
from parcae.machine import available_memory

CacheDType = Literal["float32", "bfloat16"]
CACHE_DTYPES: tuple[CacheDType, ...] = get_args(CacheDType)
SMALLEST_CAPACITY = 64


class CacheTooLarge(ConfigError):
    """The keys and values of a request do not fit in the memory that may be used."""


@dataclass(frozen=True)
class Policy:
    """Which slot of a core layer each loop uses."""

    kind: str
    slots: int | None
    """The largest number of slots; None is one per loop."""

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        if isinstance(text, Policy):
            return text
        if text in ("full", "shared"):
            return cls(text, 1 if text == "shared" else None)
        match = re.fullmatch(r"(last|first):([0-9]{1,6})", str(text))
        if match is None or int(match[2]) < 1:
            raise ConfigError(
                f"cache: {text!r} is not a policy. Use full, last:K, first:K or shared."
            )
        return cls(match[1], int(match[2]))

    def is_exact_for(self, loops: int) -> bool:
        """Whether every loop has a slot of its own."""
        return self.slots is None or self.slots >= loops

    def count(self, loops: int) -> int:
        """The number of slots that `loops` loops use."""
        return loops if self.slots is None else min(loops, self.slots)

    def slot(self, loop: int) -> int:
        """The slot that loop `loop`, counted from 1, reads and writes."""
        if self.slots is None:
            return loop - 1
        return min(loop, self.slots) - 1 if self.kind == "first" else (loop - 1) % self.slots

    def __str__(self) -> str:
        return self.kind if self.kind in ("full", "shared") else f"{self.kind}:{self.slots}"


@dataclass(frozen=True)
class Layout:
    """The layers that have keys and values, and their shapes. A Transformer is all prelude."""

    prelude_layers: int
    core_layers: int
    coda_layers: int
    outer: BlockShape
    core: BlockShape
    context_length: int

    @classmethod
    def of(cls, config: ModelConfig) -> Layout:
        layers = (config.prelude_layers, config.core_layers, config.coda_layers)
        if config.architecture == "transformer":
            layers = (config.layers, 0, 0)
        return cls(*layers, config.block, config.core_block, config.context_length)

    @property
    def outer_layers(self) -> int:
        return self.prelude_layers + self.coda_layers

    def bytes_per_token(self, policy: Policy, loops: int, itemsize: int = 4) -> int:
        core = policy.count(loops) * self.core_layers * self.core.kv_width
        return 2 * itemsize * (self.outer_layers * self.outer.kv_width + core)


class Cache:
    """Memory for `rows` sequences of `capacity` tokens; it grows by doubling."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int | None = None,
    ) -> None:
        """`max_bytes`: the largest size; the default is what memory allows."""
        self.layout, self.policy, self.dtype, self.device = layout, policy, dtype, device
        self.max_bytes = max_bytes
        self.zeroed = device.type != "cpu"
        """Whether memory is set to zero first. Attention with a mask reads positions that have not
        been written, and what is not finite would remain so behind the mask."""
        self.clear()

    def clear(self) -> None:
        """Drop the contents and free the memory."""
        self.rows = self.capacity = self.loops = 0
        self.outer = self._empty(self.layout.outer, 0, 0, 0)
        """Prelude and coda: [layer, row, position, 2, head, channel]."""
        self.core = self._empty(self.layout.core, 0, 0, 0)
        """[slot x layer, row, position, 2, head, channel]."""
        self._make_views()

    @property
    def bytes(self) -> int:
        return self.outer.nbytes + self.core.nbytes

    def bytes_per_token(self, loops: int) -> int:
        return self.layout.bytes_per_token(self.policy, loops, self.dtype.itemsize)

    def reserve(self, rows: int, capacity: int, loops: int) -> None:
        """Grow to at least this size and keep the contents. ConfigError if memory is too small."""
        if rows <= self.rows and capacity <= self.capacity and loops <= self.loops:
            return
        rows, loops = max(rows, self.rows), max(loops, self.loops)
        capacity = self._grown(capacity, self.capacity)
        self._check_memory(rows, capacity, loops, available_memory(self.device))
        slots = self.policy.count(loops) * self.layout.core_layers
        outer = self._empty(self.layout.outer, self.layout.outer_layers, rows, capacity)
        core = self._empty(self.layout.core, slots, rows, capacity)
        for new, old in ((outer, self.outer), (core, self.core)):
            if old.numel():
                new[: old.shape[0], : old.shape[1], : old.shape[2]] = old
        self.outer, self.core = outer, core
        self.rows, self.capacity, self.loops = rows, capacity, loops
        self._make_views()

    def check_row(self, capacity: int, loops: int) -> None:
        """ConfigError if a single row of this size does not fit, with the cache's memory freed."""
        free = available_memory(self.device)
        free = None if free is None else free + self.bytes
        self._check_memory(1, self._grown(capacity, 0), loops, free)

    def _grown(self, capacity: int, present: int) -> int:
        """The number of positions to allocate for `capacity` where there are `present`."""
        if capacity <= present:
            return present
        doubled = max(2 * present, SMALLEST_CAPACITY)
        return max(capacity, min(doubled, self.layout.context_length))

    def _check_memory(self, rows: int, capacity: int, loops: int, free: int | None) -> None:
        """CacheTooLarge if a cache of this size is larger than `free` bytes (None is unknown) or
        than its own limit."""
        bytes_per_token = self.bytes_per_token(loops)
        needed = bytes_per_token * rows * capacity
        limits = [limit for limit in (free, self.max_bytes) if limit is not None]
        if any(needed > limit for limit in limits):
            halve = "" if self.dtype.itemsize == 2 else "cache_dtype='bfloat16', "
            raise CacheTooLarge(
                f"cache: {rows} rows x {capacity} tokens at {loops} loops need "
                f"{format_bytes(needed)} ({format_bytes(bytes_per_token)} per token), but "
                f"{format_bytes(min(limits))} are free. Use fewer rows or tokens, fewer loops, "
                f"{halve}or a policy that shares slots (cache='last:2')."
            )

    def _make_views(self) -> None:
        """Views of single layers, made once: a view costs as much as a small operation."""
        self.addresses: tuple[int, ...] = (
            self.outer.data_ptr(),
            self.core.data_ptr(),
            *self.outer.stride()[:2],
            *self.core.stride()[:2],
        )
        """For C++: the addresses, then the strides of layers and rows."""
        layers = self.outer.unbind()
        self.prelude_layers: Sequence[Tensor] = layers[: self.layout.prelude_layers]
        self.coda_layers: Sequence[Tensor] = layers[self.layout.prelude_layers :]
        self._core_layers: Sequence[Tensor] = self.core.unbind()

    def core_layers(self, loop: int) -> Sequence[Tensor]:
        """The parts that the core layers read and write in a loop, counted from 1."""
        start = self.policy.slot(loop) * self.layout.core_layers
        return self._core_layers[start : start + self.layout.core_layers]

    def clear_row(self, row: int) -> None:
        """Set a row to zero."""
        for kv in (self.outer, self.core):
            kv[:, row] = 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        if source != target:
            for kv in (self.outer, self.core):
                kv[:, target, :length] = kv[:, source, :length]

    def settle(self, row: int, position: int, loop: int, loops: int) -> None:
        """Fill the slots of the loops that a token did not run, having stopped after `loop` of
        `loops`, with the keys and values of its last loop."""
        last = self.policy.slot(loop)
        unused = sorted({self.policy.slot(t) for t in range(loop + 1, loops + 1)} - {last})
        if not unused:
            return
        slots = self.core.unflatten(0, (-1, self.layout.core_layers))
        slots[unused, :, row, position] = slots[last, :, row, position]

    def _empty(self, shape: BlockShape, layers: int, rows: int, capacity: int) -> Tensor:
        full = (layers, rows, capacity, 2, shape.kv_heads, shape.head_dim)
        allocate = torch.zeros if self.zeroed else torch.empty
        return allocate(full, dtype=self.dtype, device=self.device)
