"""ShardedDocuments: what was written is read, and what was not is refused."""

from __future__ import annotations

import errno
import hashlib
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parcae.config import ConfigError
from parcae.data import shards as module
from parcae.data.shards import (
    FORMAT,
    HEAD,
    ShardedDocuments,
    read_manifest,
    shard_writer,
)
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, write_sealed

TOKENIZER = Tokenizer.train(["text"], 260)
OWNER = hashlib.sha256(b"this preparation").hexdigest()


def write_folder(
    folder: Path, parts: list[list[list[int]]], dtype: str, owner: str = OWNER
) -> Path:
    """One shard of training documents for each part."""
    records = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, documents in enumerate(parts):
        name = f"train-{number:05d}.shard"
        with shard_writer(folder, name, "train", np.dtype(dtype), owner) as (writer, done):
            for document in documents:
                writer.add(np.array(document, dtype), text_bytes=2 * len(document))
        records += map(asdict, done)
    TOKENIZER.save(folder / "tokenizer.json")
    (folder / "sources.json").write_text("[]")
    manifest = {
        "format": FORMAT,
        "preparation": owner,
        "dtype": dtype,
        "tokenizer": {"sha256": TOKENIZER.sha256},
        "sources_sha256": hashlib.sha256(b"[]").hexdigest(),
        "shards": {"train": records, "validation": []},
    }
    write_sealed(folder / "manifest.json", manifest)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "shards", [[[0, 5, 6], [0]], [[0, 7]]], "<u2")


documents_lists = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=9), max_size=9)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(parts=st.lists(documents_lists, max_size=4), dtype=st.sampled_from(["<u2", "<u4"]))
def test_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[int]]], dtype: str
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("shards"), parts, dtype)
    documents = [document for part in parts for document in part]
    if not documents:
        with pytest.raises(FileError, match="no documents in split train"):
            ShardedDocuments.open(folder)
        return
    shards = ShardedDocuments.open(folder, verify=True)
    assert shards.lengths.dtype == np.int64
    assert shards.lengths.tolist() == list(map(len, documents))
    for number, document in enumerate(documents):
        tokens = shards.tokens(number)
        assert tokens.dtype == np.dtype(dtype)
        assert tokens.tolist() == document
    for outside in (-1, len(documents)):
        with pytest.raises(IndexError):
            shards.tokens(outside)


def test_the_format_is_what_its_description_says(folder: Path) -> None:
    """Read with nothing but the docstring: the file is the interface to other programs."""
    data = (folder / "train-00000.shard").read_bytes()
    assert data[:16] == b"parcae-shard-1\n\0"
    assert np.frombuffer(data, "<u2", 4, 16).tolist() == [0, 5, 6, 0]
    assert np.frombuffer(data, "<u8", 3, 24).tolist() == [0, 3, 4]
    assert np.frombuffer(data, "<u8", 3, 48).tolist() == [2, 4, 2]
    assert data[72:104].hex() == OWNER
    assert data[104:] == b"parcae-\n"


def test_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    other = write_folder(tmp_path / "other", [[[0, 5, 6], [0]], [[0, 8]]], "<u2")
    assert ShardedDocuments.open(copy).fingerprint == ShardedDocuments.open(folder).fingerprint
    assert ShardedDocuments.open(other).fingerprint != ShardedDocuments.open(folder).fingerprint
    assert ShardedDocuments.open(folder).bytes_per_token == 12 / 3


@pytest.mark.slow
def test_every_truncation_is_noticed(folder: Path) -> None:
    path = folder / "train-00000.shard"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(
            FileError, match=r"train-00000\.shard: damaged.*parcae data prepare` again"
        ):
            ShardedDocuments.open(folder)
    path.write_bytes(data + b"\0")
    with pytest.raises(FileError, match="113 bytes instead of 112"):
        ShardedDocuments.open(folder)


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(folder: Path) -> None:
    path = folder / "train-00000.shard"
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(FileError, match=r"train-00000\.shard: damaged"):
            ShardedDocuments.open(folder, verify=True)
        if place < len(HEAD) or place >= len(data) - 64:
            with pytest.raises(FileError, match=r"train-00000\.shard: damaged"):
                ShardedDocuments.open(folder)
    path.write_bytes(data)
    ShardedDocuments.open(folder, verify=True)


def test_foreign_and_missing_shards(folder: Path, tmp_path: Path) -> None:
    stranger = hashlib.sha256(b"another").hexdigest()
    other = write_folder(tmp_path / "other", [[[0, 5, 6], [0]], [[0, 7]]], "<u2", stranger)
    shutil.copy(other / "train-00001.shard", folder)
    with pytest.raises(FileError, match="written by another preparation"):
        ShardedDocuments.open(folder)
    shutil.copy(folder / "train-00000.shard", folder / "train-00001.shard")
    with pytest.raises(FileError, match="damaged"):
        ShardedDocuments.open(folder)
    (folder / "train-00001.shard").unlink()
    with pytest.raises(FileError, match=r"train-00001\.shard: damaged \(missing\)"):
        ShardedDocuments.open(folder)


def test_folders_that_hold_no_shards(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="preparation is not finished"):
        ShardedDocuments.open(tmp_path)
    with pytest.raises(
        FileError, match=r"no documents in split validation.*a larger `validation_fraction`"
    ):
        ShardedDocuments.open(folder, "validation")
    with pytest.raises(ConfigError, match="split: 'test' is not one of"):
        ShardedDocuments.open(folder, "test")  # type: ignore[arg-type]
    with pytest.raises(FileError, match=r"tokenizer\.json: not a folder\. Name one"):
        ShardedDocuments.open(folder / "tokenizer.json")
    with pytest.raises(
        FileError, match=r"no documents in split train.*a smaller `validation_fraction`"
    ):
        ShardedDocuments.open(write_folder(tmp_path / "empty", [], "<u2"))
    write_sealed(folder / "manifest.json", {"format": "another"})
    with pytest.raises(FileError, match="format is not parcae-shards-1"):
        ShardedDocuments.open(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(FileError, match="not valid JSON"):
        ShardedDocuments.open(folder)


@pytest.mark.slow
def test_every_flipped_bit_of_the_manifest_is_noticed(folder: Path) -> None:
    path = folder / "manifest.json"
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 7
        path.write_bytes(flipped)
        try:
            intact = ShardedDocuments.open(folder).tokens(0).tolist() == [0, 5, 6]
        except FileError:
            continue
        assert intact
        assert chr(data[place]).isspace()


@pytest.mark.parametrize("name", ["tokenizer.json", "sources.json"])
def test_what_lies_beside_the_shards_is_verified(folder: Path, name: str) -> None:
    ShardedDocuments.open(folder, verify=True)
    data = (folder / name).read_text()
    (folder / name).write_text(data.replace('"id": 1', '"id": 4') if "tok" in name else "[1]")
    with pytest.raises(FileError, match=rf"{name}: damaged.*parcae data prepare` again"):
        ShardedDocuments.open(folder, verify=True)
    if name == "tokenizer.json":
        with pytest.raises(FileError, match="not the tokenizer of these shards"):
            ShardedDocuments.open(folder).tokenizer()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = module.ShardWriter._put

    def full(self: module.ShardWriter, data: bytes) -> None:
        class Disk:
            def write(self, _data: memoryview) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        self._stream = Disk()  # type: ignore[assignment]
        put(self, data)

    monkeypatch.setattr(module.ShardWriter, "_put", full)
    with (
        pytest.raises(FileError, match=r"train\.shard: could not be written \(No space left"),
        shard_writer(tmp_path, "train.shard", "train", np.dtype("<u2"), OWNER),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_caller_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with shard_writer(tmp_path, "a.shard", "train", np.dtype("<u2"), OWNER) as (writer, _):
            writer.add(np.zeros(3, "<u2"), 3)
            raise FileError("source.txt: not UTF-8")

    with pytest.raises(FileError, match=r"^source\.txt: not UTF-8$"):  # not dressed as our own
        fail_halfway()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileError, match="no such folder"):
        read_manifest(tmp_path / "nothing")
