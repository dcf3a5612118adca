"""Tokenised documents on disk: memory-mapped, checksummed, written whole or not at all.

    documents = Shards.open("shards/", split="train")
    documents.lengths, documents.tokens(7)

A folder holds shards, `manifest.json`, `sources.json` and the `tokenizer.json` they were made
with. The manifest is written last: a folder without one is not finished. A shard is one file,
all little-endian:

    16 bytes     b"parcae-shard-1\\n\\0"
    tokens       uint16 or uint32, document after document, each from its BOS
    0-7 bytes    padding to a multiple of 8
    offsets      uint64, one more than documents: document i is tokens[offsets[i]:offsets[i + 1]]
    64 bytes     documents, tokens, bytes per token (uint64 each), the preparation's sha256 (32
                 bytes), b"parcae-\\n"

The manifest carries a checksum of itself. Opening checks sizes and both ends of every shard, which
catches truncated and foreign files at no cost; `verify=True` reads everything and checks each
sha256.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from parcae.config import ConfigError
from parcae.data.corpus import SPLITS, Split
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, atomic_path, read_sealed, reading, sha256, write_all, writing

HEAD = b"parcae-shard-1\n\0"
TAIL = b"parcae-\n"
FOOTER = struct.Struct("<QQQ32s8s")
MANIFEST = "manifest.json"
SOURCES = "sources.json"
TOKENIZER = "tokenizer.json"
FORMAT = "parcae-shards-1"
ANEW = "Delete its folder and prepare the corpus again."


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What the manifest says of one shard."""

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
        """Write index and footer; the sha256 of the whole file."""
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
    """A writer, and a list that holds the shard's record once it is whole on disk.

    A shard that got no document leaves no file and no record.
    """
    records: list[ShardRecord] = []
    path = folder / name
    growing = folder / f".{name}.tmp"
    try:
        with writing(path):
            stream = growing.open("wb", buffering=0)
        with stream:
            writer = ShardWriter(stream, path, dtype)
            yield writer, records
            digest = writer.finish(preparation)
        if not writer.documents:
            return
        with atomic_path(path) as temporary:
            growing.replace(temporary)
    finally:
        growing.unlink(missing_ok=True)
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


class Shards:
    """One split of a prepared folder, as `Documents`; the files stay on disk until touched."""

    def __init__(self, folder: Path, manifest: dict[str, Any], split: Split) -> None:
        self.folder = folder
        self.manifest = manifest
        self.split: Split = split
        self.records = tuple(ShardRecord(**entry) for entry in manifest["shards"][split])
        self.lengths = np.empty(sum(record.documents for record in self.records), np.int64)
        self._first: list[int] = []
        self._tokens: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        first = 0
        for record in self.records:
            tokens, offsets = map_shard(folder, record, manifest)
            self._first.append(first)
            self._tokens.append(tokens)
            self._offsets.append(offsets)
            self.lengths[first : first + record.documents] = np.diff(offsets.astype(np.int64))
            first += record.documents

    @classmethod
    def open(cls, folder: str | Path, split: Split = "train", *, verify: bool = False) -> Shards:
        folder = Path(folder)
        if split not in SPLITS:
            raise ConfigError(f"split: {split!r} is not one of {', '.join(SPLITS)}.")
        manifest = read_manifest(folder)
        shards = cls(folder, manifest, split)
        if not shards.records:
            remedy = "a larger" if split == "validation" else "more documents or a smaller"
            raise FileError(
                f"{folder}: no document for {split}. Prepare it with {remedy} "
                "--validation-fraction, or with --validation."
            )
        if verify:
            for _ in shards.verify():
                pass
        return shards

    @property
    def fingerprint(self) -> str:
        """Of the tokens in their order."""
        digests = "".join(record.sha256 for record in self.records)
        return hashlib.sha256(digests.encode()).hexdigest()

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for one token; BOS is not counted."""
        text = sum(record.text_bytes for record in self.records)
        return text / max(1, int(self.lengths.sum()) - len(self.lengths))

    def tokens(self, document: int) -> np.ndarray:
        if not 0 <= document < len(self.lengths):
            raise IndexError(f"document {document} of {len(self.lengths)}")
        shard = bisect_right(self._first, document) - 1
        offsets = self._offsets[shard]
        place = document - self._first[shard]
        return self._tokens[shard][int(offsets[place]) : int(offsets[place + 1])]

    def tokenizer(self) -> Tokenizer:
        """What these documents were made with."""
        return read_tokenizer(self.folder, self.manifest)

    def verify(self, rank: int = 0, processes: int = 1) -> Iterator[ShardRecord]:
        """Read file by file; an error names the first that is not what was written.

        Several processes share the files.
        """
        check_companions(self.folder, self.manifest)
        for record in self.records[rank::processes]:
            if not is_intact(self.folder, record):
                raise FileError(_damaged(self.folder / record.file, "its checksum is wrong"))
            yield record


def read_manifest(folder: str | Path) -> dict[str, Any]:
    folder = Path(folder)
    with reading(folder):
        is_file, finished = folder.is_file(), (folder / MANIFEST).exists()
        if not folder.exists():
            raise FileError(f"{folder}: no such folder. Make one with `parcae data prepare`.")
    if is_file:
        raise FileError(f"{folder}: a file. Name a folder made by `parcae data prepare`.")
    if not finished:
        raise FileError(
            f"{folder}: not a finished preparation. Run the same `parcae data prepare` again; it "
            "goes on where it was."
        )
    manifest = read_sealed(folder / MANIFEST, ANEW)
    if manifest.get("format") != FORMAT:
        raise FileError(f"{folder / MANIFEST}: not a manifest of {FORMAT}. {ANEW}")
    return manifest


def read_tokenizer(folder: Path, manifest: dict[str, Any]) -> Tokenizer:
    """The folder's own, if it is still the one that the manifest names."""
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
        raise FileError(_damaged(folder / TOKENIZER, "not the tokenizer of these shards"))
    return tokenizer


def check_companions(folder: Path, manifest: dict[str, Any]) -> None:
    """Tokenizer and sources are what they were when the manifest was written."""
    read_tokenizer(folder, manifest)
    if sha256(folder / SOURCES) != manifest["sources_sha256"]:
        raise FileError(_damaged(folder / SOURCES, "its checksum is wrong"))


def is_intact(folder: Path, record: ShardRecord) -> bool:
    path = folder / record.file
    return path.is_file() and sha256(path) == record.sha256


def plain_record(record: ShardRecord) -> dict[str, Any]:
    return asdict(record)


def map_shard(
    folder: Path, record: ShardRecord, manifest: dict[str, Any], remedy: str = ANEW
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, left on disk, and offsets of a shard whose size, ends and index are right."""
    path = folder / record.file
    dtype = np.dtype(manifest["dtype"])

    def require(condition: bool, problem: str) -> None:
        if not condition:
            raise FileError(_damaged(path, problem, remedy))

    require(path.is_file(), "missing")
    size = path.stat().st_size
    require(size == record.bytes, f"{size:,} bytes instead of {record.bytes:,}")
    with reading(path), path.open("rb") as stream:
        head = stream.read(len(HEAD))
        stream.seek(-FOOTER.size, 2)
        documents, tokens, width, owner, tail = FOOTER.unpack(stream.read(FOOTER.size))
    require((head, tail) == (HEAD, TAIL), "not a shard, or its ends are overwritten")
    require(owner.hex() == manifest["preparation"], "it belongs to another preparation")
    counts = (record.documents, record.tokens, dtype.itemsize)
    require((documents, tokens, width) == counts, "its counts differ from the manifest's")
    body = np.memmap(path, dtype, "r", offset=len(HEAD), shape=(tokens,))
    index = record.bytes - FOOTER.size - 8 * (documents + 1)
    offsets = np.array(np.memmap(path, "<u8", "r", offset=index, shape=(documents + 1,)))
    in_order = offsets[0] == 0 and offsets[-1] == tokens and np.all(offsets[1:] > offsets[:-1])
    require(bool(in_order), "its document index is overwritten")
    return body.view(np.ndarray), offsets


def _damaged(path: Path, problem: str, remedy: str = ANEW) -> str:
    return f"{path}: damaged: {problem}. {remedy}"
