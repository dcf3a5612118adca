"""Corpus and tokenizer to tokenised documents: in order, on all cores, a little ahead.

    work = Preparation(find_files(["builtin"]), tokenizer)
    documents = tokenise(work, "train")

`tokenise` holds a small corpus in memory; `prepare.py` writes one of any size to disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parcae.config import ConfigError, require
from parcae.data.corpus import (
    BEGINNING,
    Document,
    Position,
    SourceFile,
    Split,
    content_key,
    read_documents,
    split_of,
)
from parcae.data.documents import InMemoryDocuments
from parcae.data.readers import Reading
from parcae.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 20
CHARACTERS_AHEAD = 3 << 20
DOCUMENT_CHARACTERS = 200
"""Charged for each document beside its text: what Python keeps for one, however short."""
IN_MEMORY_TOKENS = 1 << 26


@dataclass(frozen=True)
class Preparation:
    """What is prepared, and how; two that are equal give the same bytes."""

    files: tuple[SourceFile, ...]
    tokenizer: Tokenizer
    validation_files: tuple[SourceFile, ...] = ()
    """Held out as they are, and whatever equals one of their documents is not trained on."""
    validation_fraction: float = 0.005
    """Share of the documents to hold out where there are no validation files."""
    shard_tokens: int = 1 << 26
    reading: Reading = field(default_factory=Reading)

    def __post_init__(self) -> None:
        fraction = self.validation_fraction
        require(
            0 <= fraction < 1,
            "validation_fraction",
            f"{fraction} is not a share",
            "Use 0 or more and less than 1.",
        )
        require(
            self.shard_tokens >= 1,
            "shard_tokens",
            f"{self.shard_tokens} is not positive",
            "Use at least 1; the default is 67108864.",
        )

    @cached_property
    def held_out(self) -> frozenset[bytes]:
        documents = read_documents(self.validation_files, self.reading)
        return frozenset(content_key(document.text) for document in documents if document.text)

    def split(self, stage: Stage, text: str) -> Split | None:
        """Where a document goes; None is nowhere."""
        if not text:
            return None
        if not self.validation_files:
            return split_of(text, self.validation_fraction)
        if stage.held_out:
            return "validation"
        return None if content_key(text) in self.held_out else "train"

    @property
    def source_bytes(self) -> int:
        return sum(file.bytes for file in self.all_files)

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        return (*self.validation_files, *self.files)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Validation first, since it decides what may be trained on."""
        held_out = Stage(self.validation_files, True)
        return (held_out, Stage(self.files)) if self.validation_files else (Stage(self.files),)


class Stage(NamedTuple):
    files: tuple[SourceFile, ...]
    held_out: bool = False


class Encoded(NamedTuple):
    """A tokenised document, or one that is skipped and has no split; its text is let go."""

    split: Split | None
    tokens: np.ndarray
    text_bytes: int
    source: Document


def tokenise(
    work: Preparation, split: Split, *, limit_tokens: int = IN_MEMORY_TOKENS
) -> InMemoryDocuments:
    """One split tokenised on the fly into memory, for corpora that fit there."""
    documents: list[np.ndarray] = []
    total = 0
    for stage in work.stages:
        for encoded in encode_stage(work, stage, BEGINNING):
            if encoded.split != split:
                continue
            documents.append(encoded.tokens)
            total += len(encoded.tokens)
            if total > limit_tokens:
                raise ConfigError(
                    f"the corpus has more than {limit_tokens:,} tokens, too many to hold in "
                    "memory. Write them to disk with `parcae data prepare`."
                )
    if not documents:
        remedy = "Raise" if split == "validation" else "Lower"
        raise ConfigError(f"the corpus has no document for {split}. {remedy} validation_fraction.")
    return InMemoryDocuments(documents)


def encode_stage(work: Preparation, stage: Stage, start: Position) -> Iterator[Encoded]:
    """Documents in order, tokenised some batches ahead of whoever asks."""
    nothing = np.empty(0, work.tokenizer.token_dtype)

    def encode(batch: list[Document]) -> list[Encoded]:
        splits: list[Split | None] = [work.split(stage, document.text) for document in batch]
        chosen = [document.text for document, split in zip(batch, splits, strict=True) if split]
        arrays = iter(work.tokenizer.encode_documents(chosen))
        return [
            Encoded(
                split,
                next(arrays) if split else nothing,
                len(document.text.encode()),
                document._replace(text=""),
            )
            for document, split in zip(batch, splits, strict=True)
        ]

    batches = _batches(read_documents(stage.files, work.reading, start))
    for batch in _map_ahead(encode, batches):
        yield from batch


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text) + DOCUMENT_CHARACTERS
        del document
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _map_ahead(
    function: Callable[[list[Document]], list[Encoded]], batches: Iterable[list[Document]]
) -> Iterator[list[Encoded]]:
    """`map`, in order, with a few batches in the works; tokenizers brings its own threads.

    A batch with a giant in it is waited for before more is read, which bounds memory.
    """
    pending: deque[tuple[Future[list[Encoded]], int]] = deque()
    ahead = 0
    with ThreadPoolExecutor(2) as pool:
        try:
            for batch in batches:
                pending.append((pool.submit(function, batch), _characters(batch)))
                ahead += pending[-1][1]
                del batch
                while ahead > CHARACTERS_AHEAD:
                    ahead -= pending[0][1]
                    yield pending.popleft()[0].result()
            while pending:
                yield pending.popleft()[0].result()
        finally:
            for future, _ in pending:
                future.cancel()


def _characters(batch: list[Document]) -> int:
    return sum(len(document.text) + DOCUMENT_CHARACTERS for document in batch)
