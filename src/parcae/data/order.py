"""The order in which rows are read: shuffled documents, packed blocks, a mixture of sources.

An epoch is a permutation of a source's documents, keyed by (seed, source, epoch), where the source
is identified by its content (`order_key`), never by a name or a path. It is cut into
blocks of about `block_documents` documents; each block is packed separately, so it is a pure
function of (seed, epoch, block), and a position in a source is three numbers. Best fit packs the
long documents of its buffer first, so the rows of a block are shuffled too: otherwise the length
of documents would vary periodically with the blocks.

The permutation is a Feistel network over the smallest square power of two that holds all
positions; a result outside the range goes through the network again until it is inside (cycle
walking). Any block of the order is computed without storing the whole, and only 64-bit integer
arithmetic is used: numpy does not promise that its random generators stay the same.

The mixture is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32,
1980): among the sources whose next row is due, take the one with the earliest deadline. After n
rows, a source of weight w has given more than n w - 1 and less than n w + 1 rows; random choices
would be off by the square root of n. The arithmetic is in integers, so it stays exact, and the
rows read so far are its only state. `write_state` and `read_state` are the position as JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple, cast

import numpy as np

from parcae.config import ConfigError, require
from parcae.console import format_items
from parcae.data.packing import Method, Packing, pack
from parcae.schema import shorten

STATE_VERSION = 2
"""2: the order of documents follows from their lengths, not from the name of their source."""
STATE_REMEDY = "Use what state_dict() returned, or another checkpoint."
ROUNDS = 12
BLOCK_DOCUMENTS = 16_384
"""Documents that are shuffled and packed as one block, by default."""
SAMPLE_BLOCKS = 8
"""Blocks that the use of an epoch is measured on."""
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def hash64(*parts: int | str) -> int:
    """A 64-bit hash of the parts, such as `key(seed, "rows", epoch, block)`."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(positions: np.ndarray, count: int, key: int) -> np.ndarray:
    """The images of `positions` under the permutation of 0 .. count - 1 with this key."""
    half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    images = np.asarray(positions).astype(np.uint64)
    if key & 1 and count > 1:  # Feistel networks are even permutations; swap 0 and 1 for odd ones
        images = np.where(images < 2, images ^ np.uint64(1), images)
    images = _feistel(images, half_bits, key)
    outside = np.flatnonzero(images >= count)
    while len(outside):
        images[outside] = _feistel(images[outside], half_bits, key)
        outside = outside[images[outside] >= count]
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: np.uint64, key: int) -> np.ndarray:
    left = values >> half_bits
    right = values & np.uint64((1 << int(half_bits)) - 1)
    for number in range(1, ROUNDS + 1):
        round_key = np.uint64((key + number * _GOLDEN) & _WORD)
        left, right = right, left ^ (_mix(right ^ round_key) >> (np.uint64(64) - half_bits))
    return (left << half_bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, in place: every input bit affects every output bit."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def exact_weights(weights: Sequence[float]) -> list[int]:
    """Integers in the ratio of the weights' decimal digits: 0.7, 0.2, 0.1 -> 7, 2, 1."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def next_sources(weights: Sequence[int], rows_given: Sequence[int], rows: int) -> list[int]:
    """The sources of the next `rows` rows, given the rows that each source has given so far."""
    if len(weights) == 1:
        return [0] * rows
    given = list(rows_given)
    total = sum(weights)
    slack = 2 * len(weights) - 2
    start = sum(given)
    chosen = []
    for number in range(start + 1, start + rows + 1):
        first, first_deadline = -1, 0
        for source, weight in enumerate(weights):
            if (weight * number - given[source] * total) * slack < total:
                continue
            deadline = (given[source] + 1) * slack - 1
            if first < 0 or deadline * weights[first] < first_deadline * weight:
                first, first_deadline = source, deadline
        given[first] += 1
        chosen.append(first)
    return chosen


def order_keys(lengths_of_sources: Sequence[np.ndarray]) -> list[str]:
    """What identifies each source in the shuffle: its number of documents and their lengths.

    So the order follows from the seed and the documents, whatever their folder, their shards and
    the other sources are. A source that is given twice is shuffled differently each time.
    """
    digests = [
        hashlib.sha256(np.ascontiguousarray(lengths, "<i8").tobytes()).hexdigest()
        for lengths in lengths_of_sources
    ]
    return [f"{digest}, {digests[:i].count(digest)}" for i, digest in enumerate(digests)]


class SourcePosition(NamedTuple):
    """The next row of a source, and totals of what was read before."""

    epoch: int = 0
    block: int = 0
    row: int = 0
    rows_read: int = 0
    tokens_dropped: int = 0
    """Tokens cropped or left over, in completed blocks."""


class EpochUse(NamedTuple):
    """What one epoch of a source uses, measured on its first blocks."""

    rows: float
    """Rows of the whole epoch."""
    cropped_share: float
    """Share of the tokens that packing crops."""
    leftover_share: float
    """Share of the tokens in rows that are not filled."""


class PlannedRow(NamedTuple):
    packing: Packing
    row: int
    position_after: SourcePosition


@dataclass(frozen=True, eq=False)
class SourcePlan:
    """The rows of a source in order, computed without reading tokens."""

    name: str
    """For messages."""
    order_key: str
    """Identifies the source in the shuffle; see `order_keys`."""
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
                f"source {self.name}: {format_items(len(self.lengths), 'document')} with "
                f"{format_items(tokens, 'token')}, less than one row of {self.capacity} tokens "
                "(context_length + 1). Add documents, or use a shorter context_length."
            )

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def epoch_use(self) -> EpochUse:
        """What packing leaves of the tokens. Documents are shuffled, so a few blocks suffice."""
        packings = [self.block(0, block) for block in range(min(self.blocks, SAMPLE_BLOCKS))]
        tokens = sum(packing.all_tokens for packing in packings)
        return EpochUse(
            sum(packing.rows for packing in packings) * self.blocks / len(packings),
            sum(packing.cropped_tokens for packing in packings) / tokens,
            sum(packing.leftover_tokens for packing in packings) / tokens,
        )

    @property
    def blocks(self) -> int:
        """Blocks per epoch; their sizes differ by at most one document."""
        return max(1, round(len(self.lengths) / self.block_documents))

    def documents_of_block(self, epoch: int, block: int) -> np.ndarray:
        """The shuffled documents of a block."""
        count = len(self.lengths)
        start, end = (block * count // self.blocks, (block + 1) * count // self.blocks)
        return permute(
            np.arange(start, end), count, hash64(self.seed, self.order_key, "documents", epoch)
        )

    def block(self, epoch: int, block: int) -> Packing:
        """The packed block; its segments refer to documents of the source."""
        documents = self.documents_of_block(epoch, block)
        packing = pack(self.lengths[documents], self.capacity, self.buffer, self.method)
        return replace(packing, documents=documents[packing.documents])

    def row_order(self, epoch: int, block: int, rows: int) -> list[int]:
        """The order in which the rows of a block are read."""
        return permute(
            np.arange(rows), rows, hash64(self.seed, self.order_key, "rows", epoch, block)
        ).tolist()

    def rows(self, position: SourcePosition) -> Iterator[PlannedRow]:
        """Yield rows from a position, epoch after epoch, endlessly."""
        epoch, block, row, rows_read, dropped = position
        empty_blocks = 0
        while True:
            packing = self.block(epoch, block)
            if row > packing.rows:
                raise ConfigError(
                    f"state of source {self.name}: row {row} in a block of {packing.rows} rows. "
                    "The state is damaged; use another checkpoint."
                )
            order = self.row_order(epoch, block, packing.rows)
            while row < packing.rows:
                row += 1
                rows_read += 1
                after = SourcePosition(epoch, block, row, rows_read, dropped)
                yield PlannedRow(packing, order[row - 1], after)
            empty_blocks = 0 if packing.rows else empty_blocks + 1
            if empty_blocks == self.blocks:
                raise ConfigError(
                    f"block_documents: no block of {self.block_documents} documents of source "
                    f"{self.name} fills a row of {self.capacity} tokens. Use larger blocks."
                )
            dropped += packing.cropped_tokens + packing.leftover_tokens
            block, row = block + 1, 0
            if block == self.blocks:
                epoch, block = epoch + 1, 0


class LoaderPosition(NamedTuple):
    """Steps taken, and the position in each source."""

    step: int
    sources: tuple[SourcePosition, ...]


class PlannedStep(NamedTuple):
    rows: list[tuple[int, Packing, int]]
    """(source, packing, row of the packing) for every row of the step."""
    position_after: LoaderPosition


def plan_steps(
    plans: Sequence[SourcePlan],
    weights: Sequence[float],
    global_batch: int,
    seed: int,
    position: LoaderPosition,
) -> Iterator[PlannedStep]:
    """Yield the rows of every step from a position, as references to packed documents.

    The shares of the sources are exact to within one row at the end of every step. Within a step
    their order is shuffled: with w ranks, each takes every w-th row and would see a pattern.
    """
    exact = exact_weights(weights)
    streams = [plan.rows(p) for plan, p in zip(plans, position.sources, strict=True)]
    step, positions = position.step, list(position.sources)
    slots = np.arange(global_batch)
    while True:
        chosen = next_sources(exact, [p.rows_read for p in positions], global_batch)
        if len(plans) > 1:
            order = permute(slots, global_batch, hash64(seed, "mixture", step))
            chosen = [chosen[i] for i in order.tolist()]
        rows = []
        for source in chosen:
            packing, row, positions[source] = next(streams[source])
            rows.append((source, packing, row))
        step += 1
        yield PlannedStep(rows, LoaderPosition(step, tuple(positions)))


def position_to_json(identity: Mapping[str, Any], position: LoaderPosition) -> dict[str, Any]:
    """A loader's state as plain JSON: `identity` and a position."""
    sources = [
        {**source, **reached._asdict()}
        for source, reached in zip(identity["sources"], position.sources, strict=True)
    ]
    return {**identity, "step": position.step, "sources": sources}


def position_from_json(
    state: Mapping[str, Any], identity: Mapping[str, Any], blocks: Sequence[int]
) -> LoaderPosition:
    """The position in a state that has this identity; `blocks` is the blocks of each source."""
    version = _entry(state, "version")
    require(
        version == STATE_VERSION,
        "loader state, version",
        f"{version!r}, but this version of parcae reads {STATE_VERSION}: documents came in another "
        "order",
        "Continue with the version that saved it, or start a new run.",
    )
    for name, mine in identity.items():
        if name != "sources":
            _require_same(name, _entry(state, name), mine)
    sources = _entry(state, "sources")
    require(isinstance(sources, list), "loader state, sources", "not a list", STATE_REMEDY)
    _require_same("number of sources", len(sources), len(identity["sources"]))
    for number, (source, expected) in enumerate(zip(sources, identity["sources"], strict=True)):
        for name, mine in expected.items():
            _require_same(f"{name} of source {number}", _entry(source, name), mine)
    position = LoaderPosition(
        _count(state, "step"),
        tuple(
            SourcePosition(*(_count(source, name) for name in SourcePosition._fields))
            for source in sources
        ),
    )
    _check_position(position, identity["global_batch"], blocks)
    return position


def _entry(state: object, name: str) -> Any:
    present = isinstance(state, Mapping) and name in state
    require(present, f"loader state, {name}", "missing", STATE_REMEDY)
    return cast(Mapping[str, Any], state)[name]


def _count(state: object, name: str) -> int:
    value = _entry(state, name)
    valid = isinstance(value, int) and value >= 0
    require(valid, f"loader state, {name}", f"{value!r} is not a whole number >= 0", STATE_REMEDY)
    return value


def _require_same(name: str, saved: object, mine: object) -> None:
    require(
        saved == mine,
        f"loader state, {name}",
        f"saved with {shorten(saved)}, but this loader has {mine!r}, so the rows would differ",
        "Use the same documents and settings, or start without the state.",
    )


def _check_position(position: LoaderPosition, global_batch: int, blocks: Sequence[int]) -> None:
    rows = sum(source.rows_read for source in position.sources)
    require(
        rows == position.step * global_batch,
        "loader state, step",
        f"{position.step} steps of {global_batch} rows do not match {rows} rows read",
        STATE_REMEDY,
    )
    for number, (source, count) in enumerate(zip(position.sources, blocks, strict=True)):
        require(
            source.block < count,
            "loader state, block",
            f"{source.block} of source {number}, which has {format_items(count, 'block')}",
            STATE_REMEDY,
        )
