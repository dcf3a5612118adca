"""Pack documents into full rows, given only their lengths.

    packing = pack(lengths, capacity=context + 1)
    for document, start, length in packing.row(0): ...

Best fit: repeatedly add the longest buffered document that fits into the row; if none fits, crop
the shortest buffered document to fill the row exactly, and drop its rest. Ties go to the document
that entered the buffer first. So every row starts with a document (with BOS), and none is padded.
Concatenation, for comparison, joins all documents and cuts the sequence into rows.

A packing says which piece of which document goes where; tokens are read later, when a row is
needed. Every token is counted: packed + cropped + left over = all, where the documents of the
last, incomplete row are left over. `SplitDocuments` cuts long documents before they are packed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from parcae.config import require
from parcae.schema import require_range

if TYPE_CHECKING:
    from parcae.data.shards import Documents

Method = Literal["best-fit", "concatenate"]
BUFFER_DOCUMENTS = 1_000


class Segment(NamedTuple):
    """A piece of a document inside a row."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Packing:
    """Rows of `capacity` tokens; row r holds the segments row_starts[r] to row_starts[r + 1]."""

    capacity: int
    row_starts: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    cropped_tokens: int
    leftover_tokens: int

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def packed_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def all_tokens(self) -> int:
        return self.packed_tokens + self.cropped_tokens + self.leftover_tokens

    @property
    def utilisation(self) -> float:
        """Fraction of the rows' positions that hold a token of a document."""
        return self.packed_tokens / (self.rows * self.capacity) if self.rows else 1.0

    @property
    def aligned_rows(self) -> int:
        """Number of rows that begin at the start of a document."""
        return int((self.starts[self.row_starts[:-1]] == 0).sum())

    def row(self, row: int) -> Iterator[Segment]:
        """The segments of a row, in order."""
        part = slice(self.row_starts[row], self.row_starts[row + 1])
        pieces = (self.documents[part], self.starts[part], self.lengths[part])
        return map(Segment, *(piece.tolist() for piece in pieces))


def pack(
    lengths: np.ndarray,
    capacity: int,
    buffer: int = BUFFER_DOCUMENTS,
    method: Method = "best-fit",
) -> Packing:
    """Pack documents of these lengths, in this order, into rows of `capacity` tokens."""
    require_range("capacity", capacity, "Use context + 1.", at_least=1)
    require_range("buffer", buffer, at_least=1)
    lengths = np.asarray(lengths, dtype=np.int64)
    require(
        len(lengths) == 0 or bool(lengths.min() >= 1),
        "lengths",
        "a document has no tokens",
        "Start every document with BOS.",
    )
    if method == "concatenate":
        return concatenate(lengths, capacity)
    placed, row_starts = _best_fit(lengths, capacity, buffer)
    complete = lengths[placed]
    kept = complete.copy()
    if len(row_starts) > 1:
        kept[row_starts[1:] - 1] -= np.add.reduceat(complete, row_starts[:-1]) - capacity
    cropped = int((complete - kept).sum())
    return Packing(
        capacity=capacity,
        row_starts=row_starts,
        documents=placed,
        starts=np.zeros_like(placed),
        lengths=kept,
        cropped_tokens=cropped,
        leftover_tokens=int(lengths.sum() - kept.sum() - cropped),
    )


def concatenate(lengths: np.ndarray, capacity: int) -> Packing:
    """Join the documents and cut every `capacity` tokens: nothing is cropped, and rows may start
    in the middle of a document."""
    lengths = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    rows = total // capacity
    row_edges = np.arange(rows + 1, dtype=np.int64) * capacity
    edges = np.union1d(row_edges, ends[ends < row_edges[-1]])
    documents = np.searchsorted(ends, edges[:-1], side="right")
    return Packing(
        capacity=capacity,
        row_starts=np.searchsorted(edges, row_edges),
        documents=documents,
        starts=edges[:-1] - (ends - lengths)[documents],
        lengths=np.diff(edges),
        cropped_tokens=0,
        leftover_tokens=total - rows * capacity,
    )


def _best_fit(lengths: np.ndarray, capacity: int, buffer: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents in the order of placement, and the index at which each row starts.

    The buffer is a set of lengths in the bits of one integer, so the longest that fits is found by
    `bit_length`, independent of the number of buffered documents. Documents of equal length leave
    in the order they came, so two indices into the stable order by length are their queue: `head`
    is the next to leave, `tail` the next to come. Documents longer than a row never fit and are
    used only as the shortest available one: a heap of their ranks in the same order.
    """
    order = np.argsort(lengths, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    head = np.searchsorted(lengths[order], np.arange(capacity + 1)).tolist()
    tail = head.copy()
    order, rank, sizes = order.tolist(), rank.tolist(), lengths.tolist()

    waiting = 0
    oversized: list[int] = []
    entered, admitted = 0, min(buffer, len(sizes))
    placed: list[int] = []
    row_starts = [0]
    remaining = capacity
    while True:
        while entered < admitted:
            length = sizes[entered]
            if length > capacity:
                heapq.heappush(oversized, rank[entered])
            else:
                waiting |= 1 << length
                tail[length] += 1
            entered += 1
        if waiting:
            length = (waiting & ((2 << remaining) - 1)).bit_length() - 1
            if length < 0:
                length = (waiting & -waiting).bit_length() - 1
            first = head[length]
            head[length] = first + 1
            if first + 1 == tail[length]:
                waiting ^= 1 << length
        elif oversized:
            first = heapq.heappop(oversized)
            length = capacity
        else:
            break
        placed.append(order[first])
        if admitted < len(sizes):
            admitted += 1
        remaining -= length
        if remaining <= 0:
            row_starts.append(len(placed))
            remaining = capacity
    complete = row_starts[-1]
    return np.array(placed[:complete], dtype=np.int64), np.array(row_starts, dtype=np.int64)


class SplitDocuments:
    """The same documents, those longer than `longest` cut into pieces that each start with BOS.

    Best fit uses at most one row of a document and drops the rest, so most of a novel would be
    dropped. Cut to `longest = context_length + 1`, long documents fill rows instead. The model
    does not see that a piece continues another.
    """

    def __init__(self, documents: Documents, longest: int) -> None:
        require_range("longest", longest, "Use context + 1.", at_least=2)
        self._documents = documents
        self._longest = longest
        text = documents.lengths - 1
        pieces = np.maximum(1, -(-text // (longest - 1)))
        self._document = np.repeat(np.arange(len(text)), pieces)
        first_piece = np.cumsum(pieces) - pieces
        self._start = (np.arange(len(self._document)) - first_piece[self._document]) * (longest - 1)
        self.lengths = 1 + np.minimum(longest - 1, text[self._document] - self._start)

    def tokens(self, document: int) -> np.ndarray:
        whole = self._documents.tokens(int(self._document[document]))
        start, length = int(self._start[document]), int(self.lengths[document])
        if start == 0:
            return whole[:length]
        piece = whole[start : start + length].copy()
        piece[0] = whole[0]
        return piece

    @property
    def fingerprint(self) -> str:
        return f"{self._documents.fingerprint}, split at {self._longest}"


def documents_as_packed(
    documents: Documents, row_tokens: int, split_long: bool, packing: Method
) -> Documents:
    """The documents that are packed: concatenation crops nothing, so it splits nothing."""
    split = split_long and packing == "best-fit"
    return SplitDocuments(documents, row_tokens) if split else documents
