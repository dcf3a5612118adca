"""Batches of (inputs, targets) that are the same on every machine, and resume exactly.

    config = LoaderConfig(context_length=512, global_batch=64, seed=1)
    with Loader([Source(documents, weight=1.0, name="web")], config) as loader:
        for inputs, targets in loader: ...   # int64 [rows, context], without end
        state = loader.state_dict()          # plain JSON; after the last batch that was taken

Row i of step s depends on (seed, s, i) only. Rank k of w takes the rows k, k + w, ... of a step,
so any number of ranks reads the same steps; what a background thread makes ahead is not part of
the state. With several sources, shares are exact to within one row at the end of every step; the
order inside a step is shuffled, so that no rank sees one source only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from parcae.config import ConfigError, require
from parcae.data.documents import Documents, SplitDocuments
from parcae.data.packing import BUFFER_DOCUMENTS, Method, Packing, pack
from parcae.data.plan import PlannedStep, Position, SourcePlan, SourcePosition, plan_steps
from parcae.data.prefetch import prefetched
from parcae.data.state import read_state, write_state
from parcae.schema import Settings, setting

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LoaderConfig(Settings, table="data"):
    """How documents become batches. All but `prefetch` decide what the batches contain."""

    context_length: int = setting(MISSING, "tokens of a row", at_least=1)
    global_batch: int = setting(MISSING, "rows of an optimiser step, over all ranks", at_least=1)
    seed: int = 0
    packing: Method = "best-fit"
    split_long: bool = False
    """Cut documents longer than a row into pieces that each start with BOS, instead of dropping
    what best fit crops of them. The paper does not; for textbooks, novels and code it matters."""
    buffer: int = setting(BUFFER_DOCUMENTS, "documents that best fit chooses from", at_least=1)
    block_documents: int = setting(16_384, "documents that are packed together", at_least=1)
    """The unit that is planned ahead."""
    prefetch: int = setting(2, "batches prepared ahead in a background thread", at_least=0)

    @property
    def row_tokens(self) -> int:
        """Inputs and targets overlap in all but one token."""
        return self.context_length + 1


@dataclass(frozen=True, eq=False)
class Source:
    """Documents and their share of the rows, in proportion to the other sources' weights."""

    documents: Documents
    weight: float = 1.0
    name: str = "documents"


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor

    def micro_batches(self, rows: int) -> Iterator[Batch]:
        """The same rows, `rows` at a time, for gradient accumulation."""
        for start in range(0, len(self.inputs), rows):
            yield Batch(self.inputs[start : start + rows], self.targets[start : start + rows])


class Loader:
    """The batches of one rank; see the module for what is promised."""

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
        self._weights = [_plain_weight(source) for source in sources]
        self._documents = [
            _documents_as_packed(source.documents, config.row_tokens, config.split_long)
            for source in sources
        ]
        self._rank, self._world_size = rank, world_size
        self._plans = tuple(
            SourcePlan(
                name=source.name,
                lengths=documents.lengths,
                capacity=config.row_tokens,
                buffer=config.buffer,
                block_documents=config.block_documents,
                method=config.packing,
                seed=config.seed,
            )
            for source, documents in zip(sources, self._documents, strict=True)
        )
        self._identity = _identity(sources, config)
        self._stream: Iterator[tuple[Batch, Position]] | None = None
        self._position = Position(0, tuple(SourcePosition() for _ in sources))
        if state is not None:
            self.load_state_dict(state)

    @property
    def step(self) -> int:
        """Batches taken so far: the number of the step that comes next."""
        return self._position.step

    @property
    def position(self) -> Position:
        return self._position

    @property
    def tokens_per_step(self) -> int:
        """Targets of a step, over all ranks."""
        return self.config.global_batch * self.config.context_length

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            self._stream = prefetched(self._batches(), self.config.prefetch)
        try:
            batch, self._position = next(self._stream)
        except BaseException:
            self.close()  # so that another call starts again at this step
            raise
        return batch

    def skip(self, steps: int) -> None:
        """Go on as if so many batches had been taken; they are planned, but no token is read."""
        self.close()
        planned = self._planned_steps()
        for _ in range(steps):
            self._position = next(planned).position_after

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint: the position, and what it is a position in."""
        return write_state(self._identity, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; the number of ranks and the prefetching may differ."""
        position = read_state(state, self._identity, [plan.blocks for plan in self._plans])
        self.close()
        self._position = position

    def close(self) -> None:
        """End the background thread. The loader can be used again, from the same position."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _planned_steps(self) -> Iterator[PlannedStep]:
        batch, seed = self.config.global_batch, self.config.seed
        return plan_steps(self._plans, self._weights, batch, seed, self._position)

    def _batches(self) -> Iterator[tuple[Batch, Position]]:
        """Bound to values, not to the loader, so that a forgotten loader is not kept alive."""
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
    split_long: bool = False,
) -> Iterator[Batch]:
    """At most `limit` rows, the same at every call: packed in the documents' order, unshuffled.

    Best fit packs long documents first, so a limit takes rows at even distances over all, not the
    first ones. The last batch may be smaller.
    """
    require(
        context_length >= 1, "context_length", f"{context_length} is not positive", "Use 1 or more."
    )
    require(batch_rows >= 1, "batch_rows", f"{batch_rows} is not positive", "Use at least 1.")
    if limit is not None:
        require(limit >= 1, "limit", f"{limit} is not positive", "Use at least 1.")
    documents = _documents_as_packed(documents, context_length + 1, split_long)
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


def _documents_as_packed(documents: Documents, row_tokens: int, split_long: bool) -> Documents:
    return SplitDocuments(documents, row_tokens) if split_long else documents


def _check_sources(sources: Sequence[Source]) -> None:
    require(len(sources) > 0, "data.sources", "there is none", "Name at least one.")
    names = [source.name for source in sources]
    require(
        len(set(names)) == len(names),
        "data.sources",
        f"two have the same name among {', '.join(names)}",
        "Names tell sources apart in the shuffle and in the state; make them differ.",
    )
    for source in sources:
        is_number = isinstance(source.weight, Real) and not isinstance(source.weight, bool)
        require(
            is_number and 0 < source.weight < float("inf"),
            f"weight of source {source.name}",
            f"{source.weight!r} is not a positive number",
            "Leave the source out, or give it a share.",
        )


def _plain_weight(source: Source) -> float:
    """As it is spelled, whatever library it comes from, since the state is plain JSON."""
    return float(str(source.weight))


def _check_ranks(config: LoaderConfig, rank: int, world_size: int) -> None:
    require(world_size >= 1, "world_size", f"{world_size} is not positive", "Use at least 1.")
    require(
        0 <= rank < world_size, "rank", f"{rank} is not one of {world_size}", "Count ranks from 0."
    )
    require(
        config.global_batch % world_size == 0,
        "data.global_batch",
        f"{config.global_batch} rows cannot be shared evenly by {world_size} ranks",
        f"Use a multiple of {world_size}.",
    )


def _identity(sources: Sequence[Source], config: LoaderConfig) -> dict[str, Any]:
    """What must be the same for a position to mean the same rows."""
    settings = asdict(config)
    del settings["prefetch"]
    return {
        "version": STATE_VERSION,
        **settings,
        "sources": [
            {"name": s.name, "weight": _plain_weight(s), "fingerprint": s.documents.fingerprint}
            for s in sources
        ],
    }
