"""The order in which sources are read: shuffled, cut into blocks, each block packed on its own.

An epoch is a permutation of the documents by (seed, source, epoch). It is cut into blocks of about
`block_documents`; a block is packed by itself, so it is a pure function of (seed, epoch, block),
and a position is three numbers. Best fit packs the long documents of its buffer first, so the rows
of a block are shuffled as well: otherwise the length of documents would swing with every block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from parcae.config import ConfigError
from parcae.data.mixture import exact_weights, next_sources
from parcae.data.packing import Method, Packing, pack
from parcae.data.shuffle import key, permute


class SourcePosition(NamedTuple):
    """How far a source was read: `row` rows of a block, and the sums of all that came before."""

    epoch: int = 0
    block: int = 0
    row: int = 0
    rows_read: int = 0
    tokens_dropped: int = 0
    """Cropped or left over, in the blocks that were read to their end."""


class PlannedRow(NamedTuple):
    packing: Packing
    row: int
    position_after: SourcePosition


@dataclass(frozen=True, eq=False)
class SourcePlan:
    """All rows of a source, in order, without reading a token."""

    name: str
    lengths: np.ndarray
    capacity: int
    buffer: int
    block_documents: int
    method: Method
    seed: int

    def __post_init__(self) -> None:
        tokens = int(self.lengths.sum())
        if tokens < self.capacity:
            raise ConfigError(
                f"source {self.name}: {len(self.lengths)} documents with {tokens} tokens do not "
                f"fill one row of {self.capacity} (context_length + 1). "
                "Add documents or use a shorter context_length."
            )

    @property
    def blocks(self) -> int:
        """Blocks in an epoch, all of one size to within a document: no small one at the end."""
        return max(1, round(len(self.lengths) / self.block_documents))

    def documents_of_block(self, epoch: int, block: int) -> np.ndarray:
        count = len(self.lengths)
        start, end = (block * count // self.blocks, (block + 1) * count // self.blocks)
        return permute(np.arange(start, end), count, key(self.seed, self.name, "documents", epoch))

    def block(self, epoch: int, block: int) -> Packing:
        """The packed block; its segments name documents of the source."""
        documents = self.documents_of_block(epoch, block)
        packing = pack(self.lengths[documents], self.capacity, self.buffer, self.method)
        return replace(packing, documents=documents[packing.documents])

    def row_order(self, epoch: int, block: int, rows: int) -> list[int]:
        return permute(
            np.arange(rows), rows, key(self.seed, self.name, "rows", epoch, block)
        ).tolist()

    def rows(self, position: SourcePosition) -> Iterator[PlannedRow]:
        """Row after row from a position on, epoch after epoch, without end."""
        epoch, block, row, rows_read, dropped = position
        fruitless = 0
        while True:
            packing = self.block(epoch, block)
            if row > packing.rows:
                raise ConfigError(
                    f"state of source {self.name}: row {row} of a block of {packing.rows} rows. "
                    "The state is damaged; use another checkpoint."
                )
            order = self.row_order(epoch, block, packing.rows)
            while row < packing.rows:
                row += 1
                rows_read += 1
                after = SourcePosition(epoch, block, row, rows_read, dropped)
                yield PlannedRow(packing, order[row - 1], after)
            fruitless = 0 if packing.rows else fruitless + 1
            if fruitless == self.blocks:
                raise ConfigError(
                    f"block_documents: no block of {self.block_documents} documents of source "
                    f"{self.name} fills a row of {self.capacity} tokens. Use larger blocks."
                )
            dropped += packing.cropped_tokens + packing.leftover_tokens
            block, row = block + 1, 0
            if block == self.blocks:
                epoch, block = epoch + 1, 0


class Position(NamedTuple):
    """Steps taken, and how far each source was read for them."""

    step: int
    sources: tuple[SourcePosition, ...]


class PlannedStep(NamedTuple):
    rows: list[tuple[int, Packing, int]]
    """(source, packing, row of it) for every row of the step."""
    position_after: Position


def plan_steps(
    plans: Sequence[SourcePlan],
    weights: Sequence[float],
    global_batch: int,
    seed: int,
    position: Position,
) -> Iterator[PlannedStep]:
    """The rows of every step from a position on, as references to packed documents.

    Shares of the sources are exact to within a row at the end of every step; inside a step their
    order is shuffled, since ranks take every so many-th row and would meet a regular pattern.
    """
    exact = exact_weights(weights)
    streams = [plan.rows(p) for plan, p in zip(plans, position.sources, strict=True)]
    step, reached = position.step, list(position.sources)
    slots = np.arange(global_batch)
    while True:
        chosen = next_sources(exact, [p.rows_read for p in reached], global_batch)
        if len(plans) > 1:
            order = permute(slots, global_batch, key(seed, "mixture", step))
            chosen = [chosen[i] for i in order.tolist()]
        rows = []
        for source in chosen:
            packing, row, reached[source] = next(streams[source])
            rows.append((source, packing, row))
        step += 1
        yield PlannedStep(rows, Position(step, tuple(reached)))
