"""Corpus and tokenizer to shards: in parallel, in bounded memory, interruptible at any moment.

    prepare(Preparation(files, tokenizer), "shards/")

The documents are cut into parts of about `shard_tokens` tokens, in order. A part is a shard of
each split, and counts once `progress.json` names it; what a killed run wrote beyond that is
written again, with the same bytes. So the result does not depend on how often a run was stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from parcae.data.corpus import BEGINNING, SPLITS, Position, SourceFile, bytes_read
from parcae.data.encoding import Encoded, Preparation, encode_stage
from parcae.data.shards import FORMAT, MANIFEST, plain_record, read_manifest, shard_writer
from parcae.files import FileError, exclusive, read_json, sha256, write_json

PROGRESS = "progress.json"
SOURCES = "sources.json"


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
            if error.__cause__ is None:  # a source; changing that would make it other work
                raise
            parts = len(state["parts"])
            raise FileError(
                f"{error} The {parts} shards finished so far are kept: run the same command "
                "again when this is put right, and it goes on from there."
            ) from error


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
        encoded = encode_stage(work, work.stages[number], start)
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
                skipped["held_out" if document.text_bytes else "empty"] += 1
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
