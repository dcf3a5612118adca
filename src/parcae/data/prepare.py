"""Corpus and tokenizer to shards: in parallel, in bounded memory, interruptible at any moment.

    prepare(Preparation(files, tokenizer), "shards/")

The documents are cut into parts of about `shard_tokens` tokens, in order. A part is a shard of
each split, and counts once `progress.json` names it; what a killed run wrote beyond that is
written again, with the same bytes. So the result does not depend on how often a run was stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parcae.config import ConfigError, require
from parcae.data.corpus import (
    BEGINNING,
    SPLITS,
    Document,
    Position,
    SourceFile,
    Split,
    bytes_read,
    content_key,
    read_documents,
    split_of,
)
from parcae.data.documents import InMemoryDocuments
from parcae.data.readers import Reading
from parcae.data.shards import FORMAT, MANIFEST, plain_record, read_manifest, shard_writer
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, exclusive, read_json, sha256, write_json

PROGRESS = "progress.json"
SOURCES = "sources.json"
BATCH_CHARACTERS = 1 << 20
BATCHES_AHEAD = 3
IN_MEMORY_TOKENS = 1 << 26

T = TypeVar("T")
R = TypeVar("R")


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
        return sum(file.bytes for stage in self.stages for file in stage.files)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Validation first, since it decides what may be trained on."""
        held_out = Stage(self.validation_files, True)
        return (held_out, Stage(self.files)) if self.validation_files else (Stage(self.files),)


class Stage(NamedTuple):
    files: tuple[SourceFile, ...]
    held_out: bool = False


class Encoded(NamedTuple):
    """A tokenised document, or one that is skipped and has no split."""

    split: Split | None
    tokens: np.ndarray
    text_bytes: int
    source: Document


class Update(NamedTuple):
    """How far the work is, for those who wait."""

    activity: str
    source_bytes: float
    """Done, of `work.source_bytes`."""
    tokens: int


Report = Callable[[Update], None]
Manifest = dict[str, Any]


def prepare(work: Preparation, folder: str | Path, report: Report = lambda _: None) -> Manifest:
    """Fill `folder` and return its manifest. Run it again after an interruption: it goes on."""
    folder = Path(folder)
    with exclusive(folder):
        if (folder / MANIFEST).exists():
            (folder / PROGRESS).unlink(missing_ok=True)
            manifest = read_manifest(folder)
            _same(folder, manifest["preparation"], _identify(work, _sources(work, {}, report)))
            return manifest
        _remove_leftovers(folder)
        state = _begin(work, folder, report)
        try:
            _write_parts(work, folder, state, report)
            return _finish(work, folder, state)
        except FileError as error:
            parts = len(state["parts"])
            raise FileError(
                f"{error} The {parts} shards finished so far are kept: run the same command "
                "again when this is put right, and it goes on from there."
            ) from error


def tokenise(
    work: Preparation, split: Split, *, limit_tokens: int = IN_MEMORY_TOKENS
) -> InMemoryDocuments:
    """One split tokenised on the fly into memory, for corpora that fit there."""
    documents: list[np.ndarray] = []
    total = 0
    for stage in work.stages:
        for encoded in _encode(work, stage, BEGINNING):
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
        raise ConfigError(f"the corpus has no document for {split}. Raise validation_fraction.")
    return InMemoryDocuments(documents)


def _begin(work: Preparation, folder: Path, report: Report) -> dict[str, Any]:
    """The state of an interrupted run of the same work, or a new one."""
    path = folder / PROGRESS
    earlier = read_json(path) if path.exists() else None
    sources = _sources(work, earlier["digests"] if earlier else {}, report)
    identity = _identify(work, sources)
    if earlier:
        _same(folder, earlier["preparation"], identity)
        return {**earlier, "digests": _stamps(work, sources)}
    work.tokenizer.save(folder / "tokenizer.json")
    write_json(folder / SOURCES, sources)
    state = {
        "preparation": identity,
        "digests": _stamps(work, sources),
        "next": [0, 0, 0],
        "parts": [],
    }
    write_json(path, state)
    return state


def _write_parts(work: Preparation, folder: Path, state: dict[str, Any], report: Report) -> None:
    first_stage, *rest = state["next"]
    for number in range(first_stage, len(work.stages)):
        start = Position(*rest) if number == first_stage else BEGINNING
        encoded = _encode(work, work.stages[number], start)
        watched = _watch(encoded, work, number, _tokens_so_far(state), report)
        while part := _write_part(work, folder, state, watched):
            state["next"] = [number, *part.pop("behind")]
            state["parts"].append(part)
            write_json(folder / PROGRESS, state)


def _write_part(
    work: Preparation, folder: Path, state: dict[str, Any], encoded: Iterator[Encoded]
) -> dict[str, Any] | None:
    """The next shard of each split; None when no document is left."""
    number = len(state["parts"])
    skipped = {"empty": 0, "held_out": 0}
    behind: Position | None = None
    tokens = 0
    dtype = work.tokenizer.token_dtype
    with ExitStack() as stack:
        opened = {
            split: stack.enter_context(
                shard_writer(
                    folder, f"{split}-{number:05d}.shard", split, dtype, state["preparation"]
                )
            )
            for split in SPLITS
        }
        for document in encoded:
            behind = document.source.behind
            if document.split is None:
                skipped["held_out" if document.source.text else "empty"] += 1
                continue
            writer, _ = opened[document.split]
            writer.add(document.tokens, document.text_bytes)
            tokens += len(document.tokens)
            if tokens >= work.shard_tokens:
                break
    if behind is None:
        return None
    records = [plain_record(record) for _, done in opened.values() for record in done]
    return {"behind": list(behind), "shards": records, "skipped": skipped}


def _encode(work: Preparation, stage: Stage, start: Position) -> Iterator[Encoded]:
    """Documents in order, tokenised some batches ahead of whoever asks."""
    nothing = np.empty(0, work.tokenizer.token_dtype)

    def encode(batch: list[Document]) -> list[Encoded]:
        splits: list[Split | None] = [work.split(stage, document.text) for document in batch]
        chosen = [document.text for document, split in zip(batch, splits, strict=True) if split]
        arrays = iter(work.tokenizer.encode_documents(chosen))
        return [
            Encoded(
                split, next(arrays) if split else nothing, len(document.text.encode()), document
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
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _map_ahead(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`map`, in order, with a few items in the works; tokenizers brings its own threads."""
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(2) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= BATCHES_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _finish(work: Preparation, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    records = [record for part in state["parts"] for record in part["shards"]]
    if not records:
        raise FileError(f"{folder}: the sources hold no text at all. Name others.")
    shards = {split: [r for r in records if r["split"] == split] for split in SPLITS}
    manifest = {
        "format": FORMAT,
        "preparation": state["preparation"],
        "dtype": work.tokenizer.token_dtype.str,
        "tokenizer": {"sha256": work.tokenizer.sha256, "vocab_size": work.tokenizer.vocab_size},
        "sources_sha256": sha256(folder / SOURCES),
        "totals": {
            split: {
                key: sum(record[key] for record in shards[split])
                for key in ("documents", "tokens", "text_bytes")
            }
            for split in SPLITS
        },
        "skipped": {
            key: sum(part["skipped"][key] for part in state["parts"])
            for key in ("empty", "held_out")
        },
        "shards": shards,
    }
    write_json(folder / MANIFEST, manifest)
    (folder / PROGRESS).unlink()
    return manifest


def _identify(work: Preparation, sources: list[dict[str, Any]]) -> str:
    """A sha256 of everything that decides the bytes."""
    identity = {
        "format": FORMAT,
        "tokenizer": work.tokenizer.sha256,
        "sources": sources,
        "validation_fraction": work.validation_fraction,
        "shard_tokens": work.shard_tokens,
        "reading": vars(work.reading),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _sources(work: Preparation, digests: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """Name, size and sha256 of every file; a digest already known is not computed again."""
    entries = []
    done = 0
    for stage in work.stages:
        for file in stage.files:
            report(Update("checking sources", done, 0))
            known = digests.get(str(file.path))
            digest = known[1] if known and known[0] == _stamp(file) else sha256(file.path)
            done += file.bytes
            entries.append(
                {
                    "name": file.name,
                    "held_out": stage.held_out,
                    "bytes": file.bytes,
                    "sha256": digest,
                }
            )
    return entries


def _stamps(work: Preparation, sources: list[dict[str, Any]]) -> dict[str, Any]:
    files = [file for stage in work.stages for file in stage.files]
    return {
        str(file.path): [_stamp(file), entry["sha256"]]
        for file, entry in zip(files, sources, strict=True)
    }


def _stamp(file: SourceFile) -> list[int]:
    status = file.path.stat()
    return [status.st_size, status.st_mtime_ns]


def _same(folder: Path, here: str, asked: str) -> None:
    if here != asked:
        raise FileError(
            f"{folder}: holds a preparation of other sources, another tokenizer or other settings. "
            "Choose another folder, or delete this one."
        )


def _remove_leftovers(folder: Path) -> None:
    """What a killed process left; the lock says that no other one is at work."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()


def _tokens_so_far(state: dict[str, Any]) -> int:
    return sum(record["tokens"] for part in state["parts"] for record in part["shards"])


def _watch(
    encoded: Iterable[Encoded], work: Preparation, stage: int, tokens: int, report: Report
) -> Iterator[Encoded]:
    """Pass the documents on, and tell how far they are."""
    before = sum(file.bytes for earlier in work.stages[:stage] for file in earlier.files)
    done_in_stage = bytes_read(work.stages[stage].files)
    for document in encoded:
        yield document
        tokens += len(document.tokens)
        report(Update("tokenising", before + done_in_stage(document.source), tokens))
