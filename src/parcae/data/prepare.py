"""Corpus and tokenizer to shards: in parallel, in bounded memory, interruptible at any moment.

    prepare(Preparation(files, tokenizer), "shards/")

The documents are cut into parts of about `shard_tokens` tokens, in order. A part is a shard of
each split, and counts once `progress.json` names it; what a killed run wrote beyond that is
written again, with the same bytes. So the result does not depend on how often a run was stopped.
A run that goes on first checks what is there, and writes from the first damaged part on again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from parcae.data.corpus import BEGINNING, SPLITS, Position, SourceFile, bytes_read
from parcae.data.encoding import Encoded, Preparation, encode_stage
from parcae.data.shards import (
    FORMAT,
    MANIFEST,
    SOURCES,
    TOKENIZER,
    ShardRecord,
    check_companions,
    is_intact,
    map_shard,
    plain_record,
    read_manifest,
    shard_writer,
)
from parcae.files import (
    FileError,
    WriteError,
    exclusive,
    read_sealed,
    reading,
    sha256,
    write_json,
    write_sealed,
)

PROGRESS = "progress.json"
LEFTOVER = re.compile(
    r"\.((manifest|progress|sources|tokenizer)\.json|(train|validation)-\d+\.shard)(\.\d+)?\.tmp"
)
"""Names of files that a killed process was writing."""
ONCE_MORE = "Run the same command again: it goes on from there."


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
    _check_place(work, folder)
    with exclusive(folder):
        if (folder / MANIFEST).exists():
            return _check_finished(work, folder, report)
        state = _begin(work, folder, report)
        try:
            _write_parts(work, folder, state, report)
            return _finish(work, folder, state)
        except WriteError as error:
            parts = len(state["parts"])
            raise WriteError(
                f"{error} The {parts} parts finished so far are kept: run the same command "
                "again when this is put right, and it goes on from there."
            ) from error


def _check_place(work: Preparation, folder: Path) -> None:
    """Before anything is touched: nothing of others is there, and nothing is read from there."""
    out = folder.resolve()
    for source in {file.folder for file in work.all_files if file.folder}:
        if out.is_relative_to(source.resolve()):
            raise FileError(
                f"{folder}: inside the source {source}, which would then be read with "
                "it. Write it elsewhere."
            )
    if any(file.path.resolve().is_relative_to(out) for file in work.all_files):
        raise FileError(f"{folder}: holds a source of this preparation. Write it elsewhere.")
    with reading(folder):
        if not folder.is_dir() or any((folder / name).exists() for name in (MANIFEST, PROGRESS)):
            return
        names = sorted(entry.name for entry in folder.iterdir())
    foreign = [name for name in names if name != ".lock" and not LEFTOVER.fullmatch(name)]
    if foreign:
        raise FileError(
            f"{folder}: holds other files, such as {foreign[0]}. Choose a new or an empty folder."
        )


def _check_finished(work: Preparation, folder: Path, report: Report) -> Manifest:
    manifest = read_manifest(folder)
    _same(folder, manifest["preparation"], _identify(work, _digests(work, {}, report)))
    check_companions(folder, manifest)
    for split in SPLITS:
        for record in manifest["shards"][split]:
            map_shard(folder, ShardRecord(**record), manifest)
    _remove_leftovers(folder)
    (folder / PROGRESS).unlink(missing_ok=True)
    return manifest


def _begin(work: Preparation, folder: Path, report: Report) -> dict[str, Any]:
    """The state of an interrupted run of the same work, or a new one."""
    path = folder / PROGRESS
    remedy = "Delete the folder and start again."
    earlier = read_sealed(path, remedy) if path.exists() else {"digests": {}, "parts": []}
    digests = _digests(work, earlier["digests"], report)
    identity = _identify(work, digests)
    _same(folder, earlier.get("preparation", identity), identity)
    _remove_leftovers(folder)
    parts = _intact_parts(folder, earlier["parts"], report)
    state = {"preparation": identity, "digests": digests, "parts": parts}
    if state != earlier:
        write_sealed(path, state)  # before all else, since it marks the folder as ours
    work.tokenizer.save(folder / TOKENIZER)
    write_json(folder / SOURCES, _sources(work, digests))
    return state


def _intact_parts(
    folder: Path, parts: list[dict[str, Any]], report: Report
) -> list[dict[str, Any]]:
    """Those before the first that is not as it was written; the others are made again."""
    tokens = 0
    for number, part in enumerate(parts):
        for record in part["shards"]:
            report(Update("checking shards", 0, tokens))
            if not is_intact(folder, ShardRecord(**record)):
                return parts[:number]
            tokens += record["tokens"]
    return parts


def _write_parts(work: Preparation, folder: Path, state: dict[str, Any], report: Report) -> None:
    first_stage, *rest = state["parts"][-1]["behind"] if state["parts"] else (0, *BEGINNING)
    for number in range(first_stage, len(work.stages)):
        start = Position(*rest) if number == first_stage else BEGINNING
        encoded = encode_stage(work, work.stages[number], start)
        watched = _watch(encoded, work, number, _tokens_so_far(state), report)
        while part := _write_part(work, folder, state, number, watched):
            state["parts"].append(part)
            write_sealed(folder / PROGRESS, state)


def _write_part(
    work: Preparation, folder: Path, state: dict[str, Any], stage: int, encoded: Iterator[Encoded]
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
    return {"behind": [stage, *behind], "shards": records, "skipped": skipped}


def _finish(work: Preparation, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    for file in work.all_files:
        if _stamp(file) != state["digests"][str(file.path)][0]:
            raise FileError(
                f"{file.path}: changed while it was read. Run the same command again: it finishes "
                "if the content is still the same, and says so if not."
            )
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
    for record in records:
        map_shard(folder, ShardRecord(**record), manifest, ONCE_MORE)
    write_sealed(folder / MANIFEST, manifest)
    (folder / PROGRESS).unlink()
    return manifest


def _identify(work: Preparation, digests: dict[str, Any]) -> str:
    """A sha256 of everything that decides the bytes."""
    identity = {
        "format": FORMAT,
        "tokenizer": work.tokenizer.sha256,
        "sources": _sources(work, digests),
        "validation_fraction": work.validation_fraction,
        "shard_tokens": work.shard_tokens,
        "reading": vars(work.reading),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _sources(work: Preparation, digests: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, size and sha256 of every file."""
    return [
        {"name": file.name, "held_out": stage.held_out, "bytes": stamp[0], "sha256": digest}
        for stage in work.stages
        for file in stage.files
        for stamp, digest in [digests[str(file.path)]]
    ]


def _digests(work: Preparation, known: dict[str, Any], report: Report) -> dict[str, Any]:
    """Stamp and sha256 of every file by its path; one whose stamp is known is not read again."""
    digests: dict[str, Any] = {}
    done = 0
    for file in work.all_files:
        report(Update("checking sources", done, 0))
        stamp, (known_stamp, digest) = _stamp(file), known.get(str(file.path), (None, None))
        digests[str(file.path)] = [stamp, digest if known_stamp == stamp else sha256(file.path)]
        done += stamp[0]
    return digests


def _stamp(file: SourceFile) -> list[int]:
    with reading(file.path):
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
    for entry in folder.iterdir():
        if LEFTOVER.fullmatch(entry.name):
            entry.unlink()


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
