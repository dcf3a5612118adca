"""Rows of the cache: who sits where, and what a row still knows of the text it held.

A row keeps its keys and values when its sequence has ended. A new prompt that begins like a text
some row holds, computed in the same way, takes that beginning over: a copy, not a computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several

from parcae.config import ConfigError
from parcae.infer.cache import Cache
from parcae.infer.request import DepthPlan, Request
from parcae.infer.sequence import Sequence

WORTH_WAITING = 16
"""Tokens in common for which a prompt waits until another has been read."""


class Rows:
    def __init__(self, cache: Cache, most: int, reuse: bool = True) -> None:
        self.cache, self.most, self.reuse = cache, most, reuse
        self._held: list[tuple[DepthPlan, list[int]] | None] = [None] * most
        """For each row the tokens whose keys and values are as a prompt would leave them."""
        self._seated: dict[int, Sequence] = {}
        self._order: deque[int] = deque(range(most))
        """Free rows, the longest unused first."""

    @property
    def free(self) -> int:
        """Rows that are there and that nobody sits in."""
        return sum(row < self.cache.rows for row in self._order)

    def reserve(self, requests: Several[Request], busy: int) -> None:
        """Room for these requests beside `busy` others, as far as they are served at a time.

        A row more for each, as long as there is memory: what idle rows hold may be of use.
        """
        if not requests:
            return
        loops, length = max(r.plan.loops for r in requests), self._length(requests)
        least = min(self.most, busy + len(requests))
        useful = self.reuse and self.cache.policy.is_exact_for(loops)
        kept = sum(held is not None for held in self._held) if useful else 0
        rows = min(self.most, least + kept)
        if rows > self.cache.rows:  # by doubling, like the positions
            rows = min(self.most, max(rows, 2 * self.cache.rows))
        try:
            self.cache.reserve(rows, length, loops)
        except ConfigError:
            if busy == 0:
                self._forget()
            self._reserve_some(least, length, loops)

    def _reserve_some(self, rows: int, length: int, loops: int) -> None:
        """As many rows as there is memory for; the others wait."""
        while True:
            try:
                return self.cache.reserve(rows, length, loops)
            except ConfigError:
                if rows <= max(1, self.cache.rows):
                    raise
                rows -= 1

    def _forget(self) -> None:
        """Give up what idle rows hold, and their memory."""
        self.cache.clear()
        self._held = [None] * self.most
        self._order = deque(range(self.most))

    def seat(self, waiting: deque[Sequence]) -> list[Sequence]:
        """Rows for the next sequences; a prompt like one that is seated now waits for the next."""
        wave: list[Sequence] = []
        later: list[Sequence] = []
        while waiting and self.free:
            sequence = waiting.popleft()
            if self._should_wait(sequence, wave):
                later.append(sequence)
                continue
            self._seat(sequence)
            wave.append(sequence)
        waiting.extendleft(reversed(later))
        return wave

    def unseat(self, sequence: Sequence) -> None:
        """Back to where it was before it had a row."""
        self.release(sequence)
        sequence.row, sequence.reused, sequence.computed = -1, 0, 0

    def release(self, sequence: Sequence) -> None:
        if self._seated.pop(sequence.row, None) is not None:
            self._held[sequence.row] = self._knowledge(sequence)
            self._order.append(sequence.row)

    def _seat(self, sequence: Sequence) -> None:
        source, length = self._best_source(sequence)
        row = source if source is not None and source in self._order else self._least_useful()
        self._order.remove(row)
        if source is not None:
            self.cache.copy_prefix(source, row, length)
            sequence.reused = sequence.computed = length
        sequence.row = row
        self._seated[row] = sequence
        self._held[row] = None

    def _best_source(self, sequence: Sequence) -> tuple[int | None, int]:
        best, longest = None, 0
        if not self._may_reuse(sequence):
            return best, longest
        for row in range(self.most):
            seated = self._seated.get(row)
            held = self._held[row] if seated is None else self._knowledge(seated)
            if held is None or held[0] != sequence.request.plan:
                continue
            length = min(common_prefix(held[1], sequence.tokens), len(sequence.tokens) - 1)
            if length > longest:
                best, longest = row, length
        return best, longest

    def _may_reuse(self, sequence: Sequence) -> bool:
        """Where loops share slots, what a prompt leaves depends on where it was cut."""
        return self.reuse and self.cache.policy.is_exact_for(sequence.request.plan.loops)

    def _should_wait(self, sequence: Sequence, wave: list[Sequence]) -> bool:
        """Whether a prompt that is about to be read has much that no row holds yet."""
        plan = sequence.request.plan
        alike = [other for other in wave if other.request.plan == plan]
        if not alike or not self._may_reuse(sequence):
            return False
        common = max(common_prefix(sequence.tokens, other.tokens) for other in alike)
        return common - self._best_source(sequence)[1] >= WORTH_WAITING

    def _least_useful(self) -> int:
        """An empty row that the cache has room for, or else the one that was not used longest."""
        there = [row for row in self._order if row < self.cache.rows]
        return next((row for row in there if self._held[row] is None), there[0])

    def _knowledge(self, sequence: Sequence) -> tuple[DepthPlan, list[int]]:
        plan = sequence.request.plan
        known = sequence.tokens[: sequence.computed]
        if not plan.generates_as_it_reads:
            known = known[: len(sequence.request.prompt)]
        return plan, known

    def _length(self, requests: Several[Request]) -> int:
        longest = max(len(r.prompt) + r.new_tokens for r in requests)
        return min(longest, self.cache.layout.context_length)


def common_prefix(a: Several[int], b: Several[int]) -> int:
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)
