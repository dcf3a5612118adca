"""Tokenise a corpus into shards: in parallel, in bounded memory, resumable after any interruption.

    prepare(["books/", "web/*.parquet"], "tokenizer.json", "shards/", validation_fraction=0.01)

Documents are read in order, tokenised a few batches ahead on all cores, and written in parts of
about `shard_tokens` tokens. A part is one shard per split; it is complete once `progress.json`
lists it, and anything after the last complete part is written again, with the same bytes. So the
result does not depend on how often a run was interrupted. A resumed run first verifies the parts
it finds, and starts again at the first damaged one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parcae.data import TOKENIZER_FILE
from parcae.data.readers import (
    BEGINNING,
    REPLACEMENT,
    Document,
    ReadPosition,
    bytes_read,
    read_documents,
    read_file,
)
from parcae.data.shards import (
    FORMAT,
    LARGEST_LIST,
    MANIFEST,
    SOURCES,
    Manifest,
    PreparedFolder,
    ShardRecord,
    check_companions,
    is_intact,
    map_shard,
    read_manifest,
    shard_writer,
)
from parcae.data.sources import (
    SPLITS,
    VALIDATION_FRACTION,
    Corpus,
    FileDigests,
    ReadOptions,
    SourceFile,
    Split,
    Stage,
    content_key,
    digest_files,
    file_stamp,
    find_files,
    split_of,
)
from parcae.data.tokenizer import Tokenizer, map_batches
from parcae.files import (
    FileError,
    WriteError,
    interpreting,
    lock_folder,
    read_sealed,
    reading,
    sha256,
    write_json,
    write_sealed,
)
from parcae.schema import require_range, shorten

PROGRESS = "progress.json"
WRITTEN = re.compile(
    r"\.lock|(manifest|progress|sources|tokenizer)\.json|(train|validation)-\d+\.shard"
)
"""Names of the files of a preparation."""
LEFTOVER = re.compile(
    r"\.((manifest|progress|sources|tokenizer)\.json|(train|validation)-\d+\.shard)(\.(.+-)?\d+(\.[0-9a-f]{16})?)?\.tmp"
)
"""Names of temporary files that a killed process leaves."""
SHARD_TOKENS = 1 << 26


class Update(NamedTuple):
    """Progress of a preparation."""

    activity: str
    source_bytes: float
    """Bytes of the source files that were processed."""
    total_bytes: int
    tokens: int


Report = Callable[[Update], None]
Part = dict[str, Any]


def prepare(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    validation: Sequence[str | Path] = (),
    validation_fraction: float = VALIDATION_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
    options: ReadOptions | None = None,
    report: Report = lambda _update: None,
) -> PreparedFolder:
    """Tokenise files, folders, globs or `builtin` into the folder `out`; call it again to resume.

    The documents of the sources in `validation` are held out; without them,
    `validation_fraction` of all documents is. `shard_tokens` is the number of tokens after which a
    new shard starts.
    """
    corpus = Corpus(
        find_files(sources),
        find_files(validation) if validation else (),
        validation_fraction,
        options or ReadOptions(),
    )
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.load(tokenizer)
    manifest = write_shards(Preparation(corpus, tokenizer, shard_tokens), out, report)
    return PreparedFolder(Path(out), manifest)


MARK = re.compile(r"^<\|[\w-]{1,40}\|>(?=\r?$)", re.MULTILINE)
"""A line that separates documents in many text corpora, such as <|endoftext|>."""


def check_split(files: Sequence[SourceFile], options: ReadOptions) -> None:
    """FileError if the only file has several lines such as <|endoftext|> and is not split.

    Of several files each may be a document, so there `unsplit_note` only names the lines.
    """
    if len(files) == 1 and files[0].format == "text" and not options.splits:
        marks = MARK.findall(_beginning(files[0], options))
        if len(set(marks)) < len(marks):
            raise FileError(_not_separated(files[0], max(marks, key=marks.count)))


def _beginning(file: SourceFile, options: ReadOptions) -> str:
    return next(iter(read_file(file.path, "text", options)), ("", 0))[0]


def _not_separated(file: SourceFile, mark: str) -> str:
    return (
        f"{file.path}: has lines '{mark}', but no separator is given. Separate its documents "
        f"with --separator '{mark}', in a recipe data.separator."
    )


def unsplit_note(files: Sequence[SourceFile], options: ReadOptions, documents: int) -> str | None:
    """What to check where no text file has a line of the separator, or where one has lines such as
    <|endoftext|> and no separator is given; else None.

    A file may be one document, so this is not an error. `documents` is the number in all files.
    """
    separator, start = options.separator, options.document_start
    texts = [file for file in files if file.format == "text"]
    if not texts:
        return None
    if not options.splits:
        mark = MARK.search(_beginning(texts[0], options))
        return _not_separated(texts[0], mark[0]) if mark else None
    if documents > len(files):
        if len(texts) == len(files):
            return None
        second = (read_file(file.path, "text", options, skip=1) for file in texts)
        if any(next(rest, None) for rest in second):
            return None
    name, value = ("document_start", start) if separator is None else ("separator", separator)
    where = "the text file" if len(texts) == 1 else f"the {len(texts):,} text files"
    return f"{name}: {value!r} splits {where} nowhere: each file is one document. Is it misspelt?"


@dataclass(frozen=True)
class Preparation:
    """What is tokenised, and how; equal preparations give the same bytes."""

    corpus: Corpus
    tokenizer: Tokenizer
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        require_range("shard_tokens", self.shard_tokens, at_least=1)

    @cached_property
    def held_out(self) -> frozenset[bytes]:
        """Content keys of the documents in the validation files."""
        documents = read_documents(self.corpus.validation_files, self.corpus.options)
        return frozenset(content_key(document.text) for document in documents if document.text)

    def split(self, stage: Stage, text: str) -> Split | None:
        """The split of a document; None if it is skipped."""
        if not text:
            return None
        if not self.corpus.validation_files:
            return split_of(text, self.corpus.validation_fraction)
        if stage.held_out:
            return "validation"
        return None if content_key(text) in self.held_out else "train"


def write_shards(
    work: Preparation, folder: str | Path, report: Report = lambda _update: None
) -> Manifest:
    """Write the shards and return the manifest; call it again to resume."""
    folder = Path(folder)
    _check_folder(work, folder)
    if not (folder / MANIFEST).exists():
        check_split(work.corpus.files, work.corpus.options)
        check_split(work.corpus.validation_files, work.corpus.options)
    with lock_folder(folder):
        if (folder / MANIFEST).exists():
            return _check_finished(work, folder, report)
        state = _begin(work, folder, report)
        try:
            _write_parts(work, folder, state, report)
            return _finish(work, folder, state)
        except WriteError as error:
            raise WriteError(
                f"{error} {len(state['parts'])} finished parts are kept. Fix the cause and "
                "run the same command again to resume."
            ) from error


def _check_folder(work: Preparation, folder: Path) -> None:
    """Refuse a folder that holds other files or sources, before anything is written."""
    work.corpus.check_output(folder)
    with reading(folder):
        if not folder.is_dir() or any((folder / name).exists() for name in (MANIFEST, PROGRESS)):
            return
        names = sorted(entry.name for entry in folder.iterdir())
    others = [name for name in names if name != ".lock" and not LEFTOVER.fullmatch(name)]
    if others:
        raise FileError(
            f"{folder}: contains other files, such as {others[0]}. Choose a new or empty folder."
        )


def _check_finished(work: Preparation, folder: Path, report: Report) -> Manifest:
    manifest = read_manifest(folder)
    _check_identity(folder, manifest["preparation"], work, _digests(work, {}, report))
    check_companions(folder, manifest)
    for split in SPLITS:
        for record in manifest["shards"][split]:
            map_shard(folder, ShardRecord(**record), manifest)
    _remove_leftovers(folder)
    (folder / PROGRESS).unlink(missing_ok=True)
    return manifest


def _begin(work: Preparation, folder: Path, report: Report) -> dict[str, Any]:
    """The state of an interrupted run of the same preparation, or a new state."""
    path = folder / PROGRESS
    remedy = "Delete the folder and start again."
    earlier: dict[str, Any] = {"digests": {}, "parts": []}
    if path.exists():
        earlier = read_sealed(path, remedy, largest=LARGEST_LIST)
    with interpreting(path, remedy):
        digests = _digests(work, earlier["digests"], report)
        identity = _identity(work, digests)
        if earlier["parts"]:
            _check_identity(folder, earlier["preparation"], work, digests)
        _remove_leftovers(folder)
        parts = _intact_parts(folder, earlier["parts"], report)
    state = {"preparation": identity, "digests": digests, "parts": parts}
    if state != earlier:
        write_sealed(path, state)  # first of all: it marks the folder as a preparation
    work.tokenizer.save(folder / TOKENIZER_FILE)
    write_json(folder / SOURCES, _sources(work, digests))
    return state


def _intact_parts(folder: Path, parts: list[Part], report: Report) -> list[Part]:
    """The parts before the first one with a wrong checksum."""
    if not isinstance(parts, list):
        raise TypeError(f"parts is {shorten(parts)}")
    tokens = 0
    for index, part in enumerate(parts):
        _check_part(part)
        for record in part["shards"]:
            report(Update("verifying shards", 0, 0, tokens))
            if not is_intact(folder, ShardRecord(**record)):
                return parts[:index]
            tokens += record["tokens"]
    return parts


def _check_part(part: Part) -> None:
    """Raise an error of a wrong value or type unless a part is as `_write_part` returns it."""
    counts = [*part["behind"], *(part["skipped"][key] for key in ("empty", "held_out"))]
    counts.append(part.get("replaced", 0))
    for record in part["shards"]:
        shard = ShardRecord(**record)
        counts += [shard.documents, shard.tokens, shard.text_bytes, shard.bytes]
        if shard.split not in SPLITS:
            raise ValueError(f"the split of a shard is {shorten(shard.split)}")
    if len(part["behind"]) != 3 or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError("a position or a count")


def _write_parts(work: Preparation, folder: Path, state: dict[str, Any], report: Report) -> None:
    stages = work.corpus.stages
    first_stage, *rest = state["parts"][-1]["behind"] if state["parts"] else (0, *BEGINNING)
    for index in range(first_stage, len(stages)):
        start = ReadPosition(*rest) if index == first_stage else BEGINNING
        encoded = _encode(work, stages[index], start)
        tokens = sum(record["tokens"] for part in state["parts"] for record in part["shards"])
        reported = _reported(encoded, work, index, tokens, report)
        while part := _write_part(work, folder, state, index, reported):
            state["parts"].append(part)
            write_sealed(folder / PROGRESS, state)


def _write_part(
    work: Preparation, folder: Path, state: dict[str, Any], stage: int, encoded: Iterator[Encoded]
) -> Part | None:
    """Write the next shard of each split; None if no document is left."""
    number, identity = len(state["parts"]), state["preparation"]
    skipped, replaced = {"empty": 0, "held_out": 0}, 0
    position: ReadPosition | None = None
    dtype, tokens = work.tokenizer.token_dtype, 0
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                shard_writer(folder, f"{split}-{number:05d}.shard", split, dtype, identity)
            )
            for split in SPLITS
        }
        for document in encoded:
            position = document.source.next_position
            if document.split is None:
                skipped["held_out" if document.text_bytes else "empty"] += 1
                continue
            writer, _ = writers[document.split]
            writer.add(document.tokens, document.text_bytes)
            replaced += document.replaced
            tokens += len(document.tokens)
            if tokens >= work.shard_tokens:
                break
    if position is None:
        return None
    records = [asdict(record) for _, finished in writers.values() for record in finished]
    part = {"behind": [stage, *position], "shards": records, "skipped": skipped}
    return part | ({"replaced": replaced} if replaced else {})


def _finish(work: Preparation, folder: Path, state: dict[str, Any]) -> Manifest:
    for file in work.corpus.all_files:
        if file_stamp(file) != state["digests"][str(file.path)][0]:
            raise FileError(
                f"{file.path}: changed while it was read. Run the same command again; it finishes "
                "if the content is unchanged."
            )
    records = [record for part in state["parts"] for record in part["shards"]]
    if not records:
        raise FileError(f"{folder}: the sources contain no text. Name other sources.")
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
    if replaced := sum(part.get("replaced", 0) for part in state["parts"]):
        manifest["replaced"] = replaced
    for record in records:
        map_shard(folder, ShardRecord(**record), manifest, "Run the same command again to resume.")
    write_sealed(folder / MANIFEST, manifest)
    (folder / PROGRESS).unlink()
    return manifest


def _identity(work: Preparation, digests: FileDigests) -> str:
    """sha256 of everything that determines the tokens: the formats of files, not their names."""
    sources = _sources(work, digests)
    files = [file for stage in work.corpus.stages for file in stage.files]
    for source, file in zip(sources, files, strict=True):
        source["name"] = file.format
    identity = {
        "format": FORMAT,
        "tokenizer": work.tokenizer.sha256,
        "sources": sources,
        "validation_fraction": work.corpus.validation_fraction,
        "shard_tokens": work.shard_tokens,
        "reading": work.corpus.options.identity,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _sources(work: Preparation, digests: FileDigests) -> list[dict[str, Any]]:
    """Name, size and sha256 of every file."""
    return [
        {"name": file.name, "held_out": stage.held_out, "bytes": stamp[0], "sha256": digest}
        for stage in work.corpus.stages
        for file in stage.files
        for stamp, digest in [digests[str(file.path)]]
    ]


def _digests(work: Preparation, known: FileDigests, report: Report) -> FileDigests:
    files, total = work.corpus.all_files, work.corpus.bytes
    return digest_files(
        files, known, lambda done: report(Update("hashing sources", done, total, 0))
    )


def _check_identity(folder: Path, existing: str, work: Preparation, digests: FileDigests) -> None:
    if existing != _identity(work, digests):
        raise FileError(
            f"{folder}: contains shards of other sources, another tokenizer or other settings. "
            "Choose another folder, or delete this one."
        )


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary files of killed processes; the folder's lock excludes running ones."""
    for entry in folder.iterdir():
        if LEFTOVER.fullmatch(entry.name):
            entry.unlink()


def remove_prepared(folder: Path) -> None:
    """Remove what a preparation wrote into a folder; nothing where no manifest of one is intact."""
    try:
        if (folder / MANIFEST).exists():
            read_manifest(folder)
        else:
            read_sealed(folder / PROGRESS, "", largest=LARGEST_LIST)
    except FileError:
        return
    with contextlib.suppress(OSError):  # it is a link, or other files are in it
        for path in sorted(folder.iterdir(), key=lambda path: path.name in (MANIFEST, PROGRESS)):
            if WRITTEN.fullmatch(path.name) or LEFTOVER.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


def _reported(
    encoded: Iterable[Encoded], work: Preparation, stage: int, tokens: int, report: Report
) -> Iterator[Encoded]:
    """The same documents; reports progress after each."""
    stages, total = work.corpus.stages, work.corpus.bytes
    bytes_before = sum(file.bytes for earlier in stages[:stage] for file in earlier.files)
    bytes_in_stage = bytes_read(stages[stage].files)
    for document in encoded:
        yield document
        tokens += len(document.tokens)
        done = bytes_before + bytes_in_stage(document.source)
        report(Update("tokenising", done, total, tokens))


class Encoded(NamedTuple):
    """A tokenised document; `split` is None if it is skipped."""

    split: Split | None
    tokens: np.ndarray
    text_bytes: int
    replaced: int
    """Characters that stand for invalid bytes."""
    source: Document
    """Without its text, which is no longer needed."""


def _encode(work: Preparation, stage: Stage, start: ReadPosition) -> Iterator[Encoded]:
    """Yield the documents of a stage in order, tokenised a few batches ahead."""
    no_tokens = np.empty(0, work.tokenizer.token_dtype)
    replaces = work.corpus.options.encoding_errors == "replace"

    def encode(batch: list[Document]) -> list[Encoded]:
        splits: list[Split | None] = [work.split(stage, document.text) for document in batch]
        texts = [document.text for document, split in zip(batch, splits, strict=True) if split]
        arrays = iter(work.tokenizer.encode_documents(texts))
        return [
            Encoded(
                split,
                next(arrays) if split else no_tokens,
                len(document.text.encode()),
                document.text.count(REPLACEMENT) if replaces else 0,
                document._replace(text=""),
            )
            for document, split in zip(batch, splits, strict=True)
        ]

    documents = read_documents(stage.files, work.corpus.options, start)
    for batch in map_batches(encode, documents):
        yield from batch
