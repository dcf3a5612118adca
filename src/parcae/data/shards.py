"""Tokenised documents: memory-mapped shards on disk, or arrays in memory.

    documents = ShardedDocuments.open("shards/", split="train")
    documents.lengths, documents.tokens(7)

A folder holds shards, `manifest.json`, `sources.json` and the `tokenizer.json` they were made
with. The manifest is written last: a folder without one is not finished. A shard is one file,
little-endian throughout:

    16 bytes     b"parcae-shard-1\\n\\0"
    tokens       uint16 or uint32, one document after another, each starting with BOS
    0-7 bytes    padding to a multiple of 8
    offsets      uint64, one more than documents: document i is tokens[offsets[i]:offsets[i + 1]]
    64 bytes     documents, tokens, bytes per token (uint64 each), the preparation's sha256 (32
                 bytes), b"parcae-\\n"

The manifest contains a checksum of itself. Opening a folder checks the size, both ends and the
index of every shard, which detects truncated and wrong files without reading the tokens;
`verify=True` reads every file and compares its sha256.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from parcae.config import ConfigError
from parcae.data import TOKENIZER_FILE
from parcae.data.sources import SPLITS, Split
from parcae.data.tokenizer import Tokenizer
from parcae.files import (
    FileError,
    atomic_path,
    interpreting,
    path_inside,
    read_sealed,
    reading,
    sha256,
    temporary_path,
    write_all,
    writing,
)
from parcae.schema import shorten

HEAD = b"parcae-shard-1\n\0"
TAIL = b"parcae-\n"
FOOTER = struct.Struct("<QQQ32s8s")
MANIFEST = "manifest.json"
SOURCES = "sources.json"
LARGEST_LIST = 1 << 30
"""Bytes of a JSON file with an entry for every source file, of which there may be millions."""
FORMAT = "parcae-shards-1"
TOKEN_DTYPES = ("<u2", "<u4")
REMEDY = "Delete the folder and run `parcae data prepare` again."
Manifest = dict[str, Any]


class Documents(Protocol):
    """Tokenised documents by index; every document starts with BOS."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, BOS included: int64."""
        ...

    def tokens(self, document: int) -> np.ndarray:
        """The tokens of a document: uint16 or uint32, BOS first, a view if possible."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the content: a loader's state is valid only for the same documents."""
        ...


class InMemoryDocuments:
    """Documents in one array, for corpora that fit into memory.

    InMemoryDocuments(tokenizer.encode_documents(texts))
    """

    def __init__(self, documents: Sequence[Sequence[int] | np.ndarray]) -> None:
        for index, document in enumerate(documents):
            if len(document) == 0:
                raise ConfigError(f"document {index}: no tokens. Start every document with BOS.")
        self.lengths = np.array([len(document) for document in documents], dtype=np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        joined = np.concatenate([np.asarray(d, dtype=np.int64) for d in documents] or [np.zeros(0)])
        if len(joined) and (joined.min() < 0 or joined.max() > np.iinfo(np.uint32).max):
            raise ConfigError("documents: a token is negative or exceeds 32 bits.")
        small = len(joined) == 0 or joined.max() <= np.iinfo(np.uint16).max
        self._tokens = joined.astype(np.uint16 if small else np.uint32)
        self._tokens.flags.writeable = False

    def tokens(self, document: int) -> np.ndarray:
        start = self._starts[document]
        return self._tokens[start : start + self.lengths[document]]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.lengths.tobytes())
        digest.update(self._tokens.astype(np.uint32).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The manifest's entry for one shard."""

    file: str
    split: Split
    documents: int
    tokens: int
    text_bytes: int
    bytes: int
    sha256: str


class ShardWriter:
    """Appends documents to one shard; `shard_writer` opens and finishes it."""

    def __init__(self, stream: IO[bytes], path: Path, dtype: np.dtype) -> None:
        self._stream = stream
        self._path = path
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self._offsets = array("Q", [0])
        self.text_bytes = 0
        self.file_bytes = 0
        self._put(HEAD)

    @property
    def documents(self) -> int:
        return len(self._offsets) - 1

    @property
    def tokens(self) -> int:
        return self._offsets[-1]

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        self._put(np.ascontiguousarray(tokens, self._dtype).tobytes())
        self._offsets.append(self.tokens + len(tokens))
        self.text_bytes += text_bytes

    def finish(self, preparation: str) -> str:
        """Write the index and the footer, and return the sha256 of the file."""
        self._put(b"\0" * (-self.file_bytes % 8))
        self._put(np.asarray(self._offsets).astype("<u8", copy=False).data.cast("B"))
        width = self._dtype.itemsize
        owner = bytes.fromhex(preparation)
        self._put(FOOTER.pack(self.documents, self.tokens, width, owner, TAIL))
        return self._digest.hexdigest()

    def _put(self, data: bytes | memoryview) -> None:
        with writing(self._path):
            write_all(self._stream, data)
        self._digest.update(data)
        self.file_bytes += len(data)


@contextmanager
def shard_writer(
    folder: Path, name: str, split: Split, dtype: np.dtype, preparation: str
) -> Iterator[tuple[ShardWriter, list[ShardRecord]]]:
    """A writer, and a list that receives the shard's record once the file is complete on disk.

    A shard without documents leaves no file and no record.
    """
    records: list[ShardRecord] = []
    path = folder / name
    partial = temporary_path(path)
    try:
        with writing(path):
            stream = partial.open("xb", buffering=0)
        with stream:
            writer = ShardWriter(stream, path, dtype)
            yield writer, records
            digest = writer.finish(preparation)
        if not writer.documents:
            return
        with atomic_path(path) as temporary:
            partial.replace(temporary)
    finally:
        partial.unlink(missing_ok=True)
    records.append(
        ShardRecord(
            file=name,
            split=split,
            documents=writer.documents,
            tokens=writer.tokens,
            text_bytes=writer.text_bytes,
            bytes=writer.file_bytes,
            sha256=digest,
        )
    )


class ShardedDocuments:
    """One split of a prepared folder as `Documents`, memory-mapped."""

    def __init__(self, folder: Path, manifest: Manifest, split: Split) -> None:
        self.folder = folder
        self.manifest = manifest
        self.split: Split = split
        with interpreting(folder / MANIFEST, REMEDY):
            self.records = tuple(ShardRecord(**entry) for entry in manifest["shards"][split])
        self._first: list[int] = []
        self._tokens: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        first = 0
        for record in self.records:
            tokens, offsets = map_shard(folder, record, manifest)
            self._first.append(first)
            self._tokens.append(tokens)
            self._offsets.append(offsets)
            first += record.documents
        lengths = [np.diff(offsets.astype(np.int64)) for offsets in self._offsets]
        self.lengths = np.concatenate([np.empty(0, np.int64), *lengths])

    @classmethod
    def open(
        cls, folder: str | Path, split: Split = "train", *, verify: bool = False
    ) -> ShardedDocuments:
        """Open a folder written by `prepare`; `verify` reads and checks every file first."""
        folder = Path(folder)
        if split not in SPLITS:
            raise ConfigError(f"split: {split!r} is not one of {', '.join(SPLITS)}.")
        manifest = read_manifest(folder)
        shards = cls(folder, manifest, split)
        if not shards.records:
            remedy = "a larger" if split == "validation" else "more documents or a smaller"
            raise FileError(
                f"{folder}: no documents in split {split}. Prepare it with {remedy} "
                "`validation_fraction`, or with `validation`."
            )
        if verify:
            for _ in shards.verify():
                pass
        return shards

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokens in their order."""
        return fingerprint(self.manifest, self.split)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token, BOS not counted."""
        text = sum(record.text_bytes for record in self.records)
        return text / max(1, int(self.lengths.sum()) - len(self.lengths))

    def tokens(self, document: int) -> np.ndarray:
        if not 0 <= document < len(self.lengths):
            raise IndexError(f"document {document} of {len(self.lengths)}")
        shard = bisect_right(self._first, document) - 1
        offsets = self._offsets[shard]
        index = document - self._first[shard]
        return self._tokens[shard][int(offsets[index]) : int(offsets[index + 1])]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of these documents."""
        return read_tokenizer(self.folder, self.manifest)

    def verify(self, rank: int = 0, processes: int = 1) -> Iterator[ShardRecord]:
        """Read and check file by file; the error names the first damaged one.

        Process `rank` of `processes` checks its share of the files.
        """
        check_companions(self.folder, self.manifest)
        for record in self.records[rank::processes]:
            if not is_intact(self.folder, record):
                raise FileError(_damaged(self.folder / record.file, "wrong checksum"))
            yield record


@dataclass(frozen=True)
class PreparedFolder:
    """A folder of shards and its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def skipped(self) -> dict[str, int]:
        """Number of documents that are in no shard, by reason: `empty` or `held_out`."""
        return self.manifest["skipped"]

    @property
    def replaced(self) -> int:
        """Number of characters that stand for bytes that are not UTF-8."""
        return self.manifest.get("replaced", 0)

    @property
    def documents_read(self) -> int:
        """Documents of all sources, with those that are in no shard."""
        totals = self.manifest["totals"].values()
        return sum(total["documents"] for total in totals) + sum(self.skipped.values())

    def table(self) -> list[dict[str, Any]]:
        """One row per split: documents, tokens, text_bytes, bytes_per_token, shards."""
        return [
            {
                "split": split,
                **total,
                "bytes_per_token": total["text_bytes"]
                / max(1, total["tokens"] - total["documents"]),
                "shards": len(self.manifest["shards"][split]),
            }
            for split, total in self.manifest["totals"].items()
        ]


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a finished folder."""
    folder = Path(folder)
    with reading(folder):
        is_file, finished = folder.is_file(), (folder / MANIFEST).exists()
        if not folder.exists():
            raise FileError(f"{folder}: no such folder. Create it with `parcae data prepare`.")
    if is_file:
        raise FileError(f"{folder}: not a folder. Name one written by `parcae data prepare`.")
    if not finished:
        raise FileError(
            f"{folder}: no {MANIFEST}, so its preparation is not finished. Run the same "
            "`parcae data prepare` command again to resume."
        )
    manifest = read_sealed(folder / MANIFEST, REMEDY)
    if manifest.get("format") != FORMAT:
        raise FileError(f"{folder / MANIFEST}: format is not {FORMAT}. {REMEDY}")
    with interpreting(folder / MANIFEST, REMEDY):
        if "totals" in manifest:
            PreparedFolder(folder, manifest).table()
        for split in SPLITS:
            fingerprint(manifest, split)
    return manifest


def fingerprint(manifest: Manifest, split: Split) -> str:
    """Identifies the documents of a split: sha256 of the checksums of its shards."""
    digests = "".join(entry["sha256"] for entry in manifest["shards"][split])
    return hashlib.sha256(digests.encode()).hexdigest()


def read_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The folder's tokenizer, checked against the manifest."""
    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
    with interpreting(folder / MANIFEST, REMEDY):
        expected = manifest["tokenizer"]["sha256"]
    if tokenizer.sha256 != expected:
        raise FileError(_damaged(folder / TOKENIZER_FILE, "not the tokenizer of these shards"))
    return tokenizer


def check_companions(folder: Path, manifest: Manifest) -> None:
    """Check `tokenizer.json` and `sources.json` against the manifest."""
    read_tokenizer(folder, manifest)
    if sha256(folder / SOURCES) != manifest.get("sources_sha256"):
        raise FileError(_damaged(folder / SOURCES, "wrong checksum"))


def is_intact(folder: Path, record: ShardRecord) -> bool:
    """Whether the shard exists and has its checksum."""
    path = path_inside(folder, record.file)
    if not path.is_file() or path.stat().st_size != record.bytes:
        return False
    return sha256(path) == record.sha256


def map_shard(
    folder: Path, record: ShardRecord, manifest: Manifest, remedy: str = REMEDY
) -> tuple[np.ndarray, np.ndarray]:
    """Memory-mapped tokens, and offsets, of a shard; its size, ends and index are checked."""
    path = path_inside(folder, record.file)

    def require(condition: bool, problem: str) -> None:
        if not condition:
            raise FileError(_damaged(path, problem, remedy))

    kind, preparation = manifest.get("dtype"), manifest.get("preparation")
    require(kind in TOKEN_DTYPES, f"dtype {shorten(kind)} is none of tokens")
    dtype = np.dtype(kind)
    require(path.is_file(), "missing")
    size = path.stat().st_size
    require(size == record.bytes, f"{size:,} bytes instead of {shorten(record.bytes)}")
    with reading(path), path.open("rb") as stream:
        head = stream.read(len(HEAD))
        stream.seek(-FOOTER.size, 2)
        documents, tokens, width, owner, tail = FOOTER.unpack(stream.read(FOOTER.size))
    require((head, tail) == (HEAD, TAIL), "its header or footer is wrong")
    require(owner.hex() == preparation, "written by another preparation")
    counts = (record.documents, record.tokens, dtype.itemsize)
    require((documents, tokens, width) == counts, "counts differ from the manifest")
    index = size - FOOTER.size - 8 * (documents + 1)
    require(documents > 0 and tokens > 0, "without documents")
    require(len(HEAD) + tokens * width <= index, "counts exceed its size")
    body = np.memmap(path, dtype, "r", offset=len(HEAD), shape=(tokens,))
    offsets = np.array(np.memmap(path, "<u8", "r", offset=index, shape=(documents + 1,)))
    in_order = offsets[0] == 0 and offsets[-1] == tokens and np.all(offsets[1:] > offsets[:-1])
    require(bool(in_order), "document index is wrong")
    return body.view(np.ndarray), offsets


def _damaged(path: Path, problem: str, remedy: str = REMEDY) -> str:
    return f"{path}: damaged ({problem}). {remedy}"
