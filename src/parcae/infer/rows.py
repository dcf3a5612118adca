"""Admits waiting sequences: assigns cache rows to them, and reuses prefixes of earlier ones.

A row keeps its keys and values when its sequence has ended. If a new prompt begins like the text in
some row, computed with the same plan, that prefix is copied instead of computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from parcae.config import ConfigError
from parcae.infer.cache import Cache
from parcae.infer.request import DepthPlan, Request
from parcae.infer.sequence import RunningSequence

MIN_SHARED_PREFIX = 16
"""Common tokens at the start for which a prompt waits until another prompt is read."""


class Rows:
    def __init__(
        self, cache: Cache, max_rows: int, reuse: bool = True, at_once: bool = False
    ) -> None:
        """`at_once`: allocate all rows for the whole context, so that the cache does not move."""
        self.cache, self.max_rows, self.reuse, self.at_once = cache, max_rows, reuse, at_once
        self._contents: list[tuple[DepthPlan, list[int]] | None] = [None] * max_rows
        """For each free row, the plan and tokens of the keys and values in it."""
        self._assigned: dict[int, RunningSequence] = {}
        self._free: deque[int] = deque(range(max_rows))
        """Free rows, the least recently used first."""

    @property
    def free(self) -> int:
        """The number of allocated rows without a sequence."""
        return sum(row < self.cache.rows for row in self._free)

    def reserve(self, requests: Sequence[Request], busy: int) -> None:
        """Allocate rows for these requests beside `busy` others, up to the largest number and what
        fits in memory; requests without a row wait. ConfigError if one could never have a row.

        Free rows whose contents may be reused are kept, as long as there is memory.
        """
        if not requests:
            return
        loops, length = max(r.plan.loops for r in requests), self._length(requests)
        needed = min(self.max_rows, busy + len(requests))
        if self.at_once:
            needed, length = self.max_rows, self.cache.layout.context_length
        reusable = self.reuse and self.cache.policy.is_exact_for(loops)
        kept = sum(contents is not None for contents in self._contents) if reusable else 0
        rows = min(self.max_rows, needed + kept)
        if rows > self.cache.rows:  # by doubling, like the positions
            rows = min(self.max_rows, max(rows, 2 * self.cache.rows))
        try:
            self.cache.reserve(rows, length, loops)
        except ConfigError:
            if busy == 0:
                self._forget()
            self._reserve_up_to(needed, length, loops, busy > 0)

    def _reserve_up_to(self, rows: int, length: int, loops: int, may_wait: bool) -> None:
        """Allocate as many rows as fit in memory. If not even one does and others are running, the
        request may wait for the memory that they use."""
        while True:
            try:
                return self.cache.reserve(rows, length, loops)
            except ConfigError:
                if rows > max(1, self.cache.rows):
                    rows -= 1
                    continue
                if not may_wait:
                    raise
                return self.cache.check_row(length, loops)

    def _forget(self) -> None:
        """Drop the contents of all rows and free their memory."""
        self.cache.clear()
        self._contents = [None] * self.max_rows
        self._free = deque(range(self.max_rows))

    def assign(
        self, waiting: deque[RunningSequence], running: Sequence[RunningSequence]
    ) -> list[RunningSequence]:
        """Take sequences from `waiting`, first come first served, and give them rows.

        A prompt with a long prefix in common with one that is being read waits to reuse it. One
        that is larger than the rows waits until no other sequence runs; then the rows grow.
        """
        assigned: list[RunningSequence] = []
        later: list[RunningSequence] = []
        if waiting and not running and not self._fits(waiting[0]):
            self._grow_for(waiting)
        reading = [sequence for sequence in running if sequence.is_reading]
        while waiting and self.free and self._fits(waiting[0]):
            sequence = waiting.popleft()
            if self._should_wait(sequence, [*reading, *assigned]):
                later.append(sequence)
                continue
            self._assign(sequence)
            assigned.append(sequence)
        waiting.extendleft(reversed(later))
        return assigned

    def _grow_for(self, waiting: deque[RunningSequence]) -> None:
        """Enlarge the rows, of which none is used; the first sequence fails if it cannot fit."""
        try:
            self.reserve([sequence.request for sequence in waiting], 0)
        except ConfigError:
            try:
                self.reserve([waiting[0].request], 0)
            except ConfigError as error:
                waiting.popleft().fail(error)

    def _fits(self, sequence: RunningSequence) -> bool:
        request, cache = sequence.request, self.cache
        return self._length([request]) <= cache.capacity and request.plan.loops <= cache.loops

    def release(self, sequence: RunningSequence) -> None:
        """Free the row of a sequence and keep its contents for reuse."""
        if self._assigned.pop(sequence.row, None) is not None:
            self._contents[sequence.row] = self._reusable(sequence)
            if sequence.error is not None:  # the row may hold what is not finite: see Cache.zeroed
                self._contents[sequence.row] = None
                self.cache.clear_row(sequence.row)
            self._free.append(sequence.row)

    def _assign(self, sequence: RunningSequence) -> None:
        source, length = self._best_source(sequence)
        row = source if source is not None and source in self._free else self._row_to_replace()
        self._free.remove(row)
        if source is not None:
            self.cache.copy_prefix(source, row, length)
            sequence.reused = sequence.computed = length
        sequence.row = row
        self._assigned[row] = sequence
        self._contents[row] = None

    def _best_source(
        self, sequence: RunningSequence, besides: Sequence[RunningSequence] = ()
    ) -> tuple[int | None, int]:
        """The row with the longest reusable prefix of a prompt, and its length; the rows of
        `besides` do not count."""
        best, longest = None, 0
        if not self._may_reuse(sequence):
            return best, longest
        for row in range(self.max_rows):
            other = self._assigned.get(row)
            contents = self._contents[row] if other is None else self._reusable(other)
            if other in besides or contents is None or contents[0] != sequence.request.plan:
                continue
            length = min(common_prefix(contents[1], sequence.tokens), len(sequence.tokens) - 1)
            if length > longest:
                best, longest = row, length
        return best, longest

    def _may_reuse(self, sequence: RunningSequence) -> bool:
        """Not if loops share slots: the cache then depends on how a prompt was split in passes."""
        return self.reuse and self.cache.policy.is_exact_for(sequence.request.plan.loops)

    def _should_wait(self, sequence: RunningSequence, reading: list[RunningSequence]) -> bool:
        """Whether another prompt that is being read has a much longer common prefix than any
        other row."""
        plan = sequence.request.plan
        same_plan = [other for other in reading if other.request.plan == plan]
        if not same_plan or not self._may_reuse(sequence):
            return False
        shared = [common_prefix(sequence.tokens, other.tokens) for other in same_plan]
        copied = [min(n, other.reused) for n, other in zip(shared, same_plan, strict=True)]
        present = max(*copied, self._best_source(sequence, besides=reading)[1])
        return max(shared) - present >= MIN_SHARED_PREFIX

    def _row_to_replace(self) -> int:
        """An empty allocated row, or else the least recently used."""
        allocated = [row for row in self._free if row < self.cache.rows]
        return next((row for row in allocated if self._contents[row] is None), allocated[0])

    def _reusable(self, sequence: RunningSequence) -> tuple[DepthPlan, list[int]]:
        """The tokens whose keys and values are those of a prompt read at full depth."""
        plan = sequence.request.plan
        tokens = sequence.tokens[: sequence.computed]
        if not plan.generates_as_it_reads:
            tokens = tokens[: len(sequence.request.prompt)]
        return plan, tokens

    def _length(self, requests: Sequence[Request]) -> int:
        """The longest sequence that may result, in tokens."""
        longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
        return min(longest, self.cache.layout.context_length)


def common_prefix(*sequences: Sequence[int]) -> int:
    """The number of tokens that all sequences begin with."""
    shortest, (first, *others) = min(map(len, sequences)), sequences
    for index in range(shortest):
        if any(other[index] != first[index] for other in others):
            return index
    return shortest
