"""Deterministic, resumable batches of (inputs, targets) from one or several sources.

    config = LoaderConfig(context_length=512, global_batch=64, seed=1)
    with Loader([Source(documents, weight=1.0, name="web")], config) as loader:
        for inputs, targets in loader: ...   # int64 [rows, context], endless
        state = loader.state_dict()          # plain JSON: the position after the last batch taken

Row i of step s depends on (seed, s, i) only, on every machine. Rank k of w takes the rows k, k + w,
... of a step, so any number of ranks reads the same steps. Batches prefetched by the background
thread are not part of the state. With several sources, shares are exact to within one row at the
end of every step; the order within a step is shuffled, so that no rank sees one source only.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from parcae.config import ConfigError, require
from parcae.data.order import (
    BLOCK_DOCUMENTS,
    STATE_VERSION,
    LoaderPosition,
    PlannedStep,
    SourcePlan,
    SourcePosition,
    order_keys,
    plan_steps,
    position_from_json,
    position_to_json,
)
from parcae.data.packing import BUFFER_DOCUMENTS, Method, Packing, documents_as_packed, pack
from parcae.data.shards import Documents, ShardedDocuments, read_manifest
from parcae.schema import Settings, require_range, setting

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig(Settings, table="data"):
    """How documents become batches. All fields but `prefetch` determine the content."""

    context_length: int = setting(MISSING, "tokens per row", at_least=1)
    global_batch: int = setting(MISSING, "rows per optimiser step, over all ranks", at_least=1)
    seed: int = 0
    packing: Method = "best-fit"
    split_long: bool = True
    """Cut documents longer than a row into pieces that each start with BOS, instead of dropping
    what best fit crops of them. The paper drops it; that matters for books and code."""
    buffer: int = setting(BUFFER_DOCUMENTS, "documents that best fit chooses from", at_least=1)
    block_documents: int = setting(
        BLOCK_DOCUMENTS, "documents that are shuffled and packed as one block", at_least=1
    )
    prefetch: int = setting(2, "batches prepared ahead in a background thread", at_least=0)

    @property
    def row_tokens(self) -> int:
        """Tokens per row: inputs and targets overlap in all but one token."""
        return self.context_length + 1


@dataclass(frozen=True, eq=False)
class Source:
    """Documents and their weight: their share of the rows, relative to the other sources."""

    documents: Documents
    weight: float = 1.0
    name: str = "documents"


class Batch(NamedTuple):
    """Token ids, int64 [rows, context]; targets are the inputs shifted by one."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Loader:
    """Iterator over the batches of one rank; see the module for its guarantees."""

    def __init__(
        self,
        sources: Sequence[Source],
        config: LoaderConfig,
        rank: int = 0,
        world_size: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        _check_sources(sources)
        _check_ranks(config, rank, world_size)
        self.config = config
        self.sources = tuple(sources)
        self._weights = [_plain_weight(source) for source in sources]
        self._documents = [
            documents_as_packed(
                source.documents, config.row_tokens, config.split_long, config.packing
            )
            for source in sources
        ]
        keys = order_keys([source.documents.lengths for source in sources])
        self._rank, self._world_size = rank, world_size
        self.plans = tuple(
            SourcePlan(
                name=source.name,
                order_key=order_key,
                lengths=documents.lengths,
                capacity=config.row_tokens,
                buffer=config.buffer,
                block_documents=config.block_documents,
                method=config.packing,
                seed=config.seed,
            )
            for source, documents, order_key in zip(sources, self._documents, keys, strict=True)
        )
        self._identity = _identity(sources, config)
        self._stream: Iterator[tuple[Batch, LoaderPosition]] | None = None
        self._position = LoaderPosition(0, tuple(SourcePosition() for _ in sources))
        if state is not None:
            self.load_state_dict(state)

    @property
    def step(self) -> int:
        """Batches taken so far, which is the index of the next step."""
        return self._position.step

    @property
    def position(self) -> LoaderPosition:
        return self._position

    @property
    def tokens_per_step(self) -> int:
        """Targets per step, over all ranks."""
        return self.config.global_batch * self.config.context_length

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            self._stream = prefetched(self._batches(), self.config.prefetch)
        try:
            batch, self._position = next(self._stream)
        except BaseException:
            self.close()  # so that the next call starts again at this step
            raise
        return batch

    def skip(self, steps: int) -> None:
        """Skip this many batches without reading their tokens."""
        self.close()
        planned = self._planned_steps()
        for _ in range(steps):
            self._position = next(planned).position_after

    def state_dict(self) -> dict[str, Any]:
        """The position, and what identifies the data it refers to, as plain JSON."""
        return position_to_json(self._identity, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken; ranks and `prefetch` may differ."""
        position = position_from_json(state, self._identity, [plan.blocks for plan in self.plans])
        self.close()
        self._position = position

    def close(self) -> None:
        """Stop the background thread. The loader stays usable, from the same position."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _planned_steps(self) -> Iterator[PlannedStep]:
        batch, seed = self.config.global_batch, self.config.seed
        return plan_steps(self.plans, self._weights, batch, seed, self._position)

    def _batches(self) -> Iterator[tuple[Batch, LoaderPosition]]:
        """A generator without a reference to the loader, so that the loader can be collected."""
        documents = self._documents
        mine = slice(self._rank, None, self._world_size)
        context = self.config.context_length
        return (
            (read_batch(documents, step.rows[mine], context), step.position_after)
            for step in self._planned_steps()
        )


def read_batch(
    documents: Sequence[Documents], rows: Sequence[tuple[int, Packing, int]], context_length: int
) -> Batch:
    """Gather the tokens of packed rows."""
    tokens = np.empty((len(rows), context_length + 1), dtype=np.uint32)
    for out, (source, packing, row) in zip(tokens, rows, strict=True):
        read = documents[source].tokens
        end = 0
        for document, start, length in packing.row(row):
            begin, end = end, end + length
            out[begin:end] = read(document)[start : start + length]
    inputs, targets = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def validation_batches(
    documents: Documents,
    context_length: int,
    batch_rows: int,
    limit: int | None = None,
    packing: Method = "best-fit",
    split_long: bool = True,
) -> Iterator[Batch]:
    """Yield at most `limit` rows, the same at every call: packed in order, not shuffled.

    Best fit packs long documents first, so a limit takes evenly spaced rows rather than the first
    ones. The last batch may be smaller.
    """
    require_range("context_length", context_length, at_least=1)
    require_range("batch_rows", batch_rows, at_least=1)
    if limit is not None:
        require_range("limit", limit, at_least=1)
    documents = documents_as_packed(documents, context_length + 1, split_long, packing)
    packed = pack(documents.lengths, context_length + 1, method=packing)
    if packed.rows == 0:
        raise ConfigError(
            f"validation documents: {packed.all_tokens} tokens do not fill one row of "
            f"{context_length + 1} (context_length + 1). "
            "Hold out more documents or use a shorter context_length."
        )
    count = packed.rows if limit is None else min(limit, packed.rows)
    rows = [(0, packed, i * packed.rows // count) for i in range(count)]
    for start in range(0, count, batch_rows):
        yield read_batch([documents], rows[start : start + batch_rows], context_length)


def _check_sources(sources: Sequence[Source]) -> None:
    require(len(sources) > 0, "data.sources", "none given", "Name at least one.")
    names = [source.name for source in sources]
    require(
        len(set(names)) == len(names),
        "data.sources",
        f"names are not unique: {', '.join(names)}",
        "Give each source its own name, which messages use.",
    )
    for source in sources:
        is_number = isinstance(source.weight, Real) and not isinstance(source.weight, bool)
        require(
            is_number and 0 < source.weight < float("inf"),
            f"weight of source {source.name}",
            f"{source.weight!r} is out of range",
            "It must be a finite number > 0. To omit a source, remove it.",
        )


def _plain_weight(source: Source) -> float:
    """The weight as a Python float with the same decimal digits, for the JSON state."""
    return float(str(source.weight))


def _check_ranks(config: LoaderConfig, rank: int, world_size: int) -> None:
    require_range("world_size", world_size, at_least=1)
    require_range("rank", rank, at_least=0, below=world_size)
    require(
        config.global_batch % world_size == 0,
        "data.global_batch",
        f"{config.global_batch} rows cannot be divided evenly among {world_size} ranks",
        f"Use a multiple of {world_size}.",
    )


def _identity(sources: Sequence[Source], config: LoaderConfig) -> dict[str, Any]:
    """The settings and documents that a saved position depends on."""
    settings = asdict(config)
    del settings["prefetch"]
    return {
        "version": STATE_VERSION,
        **settings,
        "sources": [
            {"weight": _plain_weight(source), "fingerprint": source.documents.fingerprint}
            for source in sources
        ],
    }


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items in order, with up to `depth` of them prepared ahead in a thread.

    An exception is raised where its item would have been. Closing or deleting the generator ends
    the thread.
    """
    if depth == 0:
        yield from items
        return
    room = threading.Semaphore(depth)
    ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()

    def produce() -> None:
        try:
            while room.acquire() and not stopped.is_set():
                ready.put((next(items), None))
        except BaseException as error:
            ready.put((None, error))

    thread = threading.Thread(target=produce, name="parcae-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item
    finally:
        stopped.set()
        room.release()
        if not sys.is_finalizing():  # daemon threads no longer run then, so join would hang
            thread.join()


def with_held_out_rows(folders: Iterable[Path], context_length: int) -> list[Path]:
    """The folders of shards whose held-out documents fill at least one row."""
    totals = {f: read_manifest(f)["totals"]["validation"]["tokens"] for f in folders}
    return [folder for folder, tokens in totals.items() if tokens > context_length]


def held_out_batches(
    folders: Sequence[Path],
    context_length: int,
    batch_rows: int,
    rows: int,
    packing: Method,
    split_long: bool,
) -> Iterator[Batch]:
    """At most `rows` held-out rows, shared evenly by the folders of shards."""
    for number, folder in enumerate(folders):
        first, last = (rows * n // len(folders) for n in (number, number + 1))
        yield from validation_batches(
            ShardedDocuments.open(folder, "validation"),
            context_length,
            batch_rows,
            limit=max(1, last - first),
            packing=packing,
            split_long=split_long,
        )
