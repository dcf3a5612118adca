"""Preparation: the shards hold what a plain loop would give, however often it was interrupted."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from preparing import (
    FRACTION,
    Stopped,
    contents,
    documents_of,
    small_texts,
    small_tokenizer,
    work_on,
    write_source,
    write_sources,
)

from parcae.config import ConfigError
from parcae.data import preparation as module
from parcae.data import tokenizer as tokenizer_module
from parcae.data.loader import Loader, LoaderConfig, Source
from parcae.data.preparation import Update, prepare, write_shards
from parcae.data.readers import Document, ReadPosition
from parcae.data.shards import InMemoryDocuments, ShardedDocuments, ShardWriter
from parcae.data.sources import content_key, find_files, split_of
from parcae.data.tokenizer import Tokenizer, _batches
from parcae.files import FileError, lock_folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return small_texts()


@pytest.fixture
def source(tmp_path: Path, texts: list[str]) -> Path:
    return write_sources(tmp_path / "source", texts)


def plain_loop(tokenizer: Tokenizer, texts: list[str], split: str) -> list[list[int]]:
    """The oracle: tokenizers alone, one text after the other."""
    library = tokenizers.Tokenizer.from_str(tokenizer.content)
    library.encode_special_tokens = True
    chosen = [text for text in texts if text and split_of(text, FRACTION) == split]
    return [[0, *library.encode(text).ids] for text in chosen]


@pytest.mark.slow
def test_shards_hold_what_a_plain_loop_gives(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    updates: list[Update] = []
    work = work_on(source, tokenizer)
    manifest = write_shards(work, tmp_path / "out", updates.append)
    for split in ("train", "validation"):
        expected = plain_loop(tokenizer, texts, split)
        assert documents_of(tmp_path / "out", split) == expected
        assert manifest["totals"][split]["documents"] == len(expected)
        assert manifest["totals"][split]["tokens"] == sum(map(len, expected))
    assert manifest["skipped"] == {"empty": 6, "held_out": 0}
    assert len(manifest["shards"]["train"]) > 5
    total = (
        manifest["totals"]["train"]["text_bytes"] + manifest["totals"]["validation"]["text_bytes"]
    )
    assert total == sum(len(text.encode()) for text in texts)
    assert updates[-1].source_bytes == work.corpus.bytes
    copied = Tokenizer.load(tmp_path / "out")
    assert copied.sha256 == tokenizer.sha256 == manifest["tokenizer"]["sha256"]


@pytest.mark.slow
def test_in_memory_documents_equal_the_shards(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    prepared = prepare(
        [source], tokenizer, tmp_path / "out", validation_fraction=FRACTION, shard_tokens=2000
    )
    rows = {row["split"]: row for row in prepared.table()}
    for split in ("train", "validation"):
        chosen = [text for text in texts if text and split_of(text, FRACTION) == split]
        memory = InMemoryDocuments(tokenizer.encode_documents(chosen))
        documents = [memory.tokens(index).tolist() for index in range(len(memory.lengths))]
        assert documents == documents_of(tmp_path / "out", split)
        assert rows[split]["documents"] == len(documents)
        assert rows[split]["tokens"] == memory.lengths.sum()
    assert prepared.skipped == {"empty": 6, "held_out": 0}


@pytest.mark.slow
def test_splits_never_share_a_text_and_do_not_move(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    write_source(source / "c.jsonl.gz", texts[:50])  # duplicates
    write_shards(work_on(source, tokenizer), tmp_path / "one")
    write_source(source / "0-new.jsonl.gz", [f"{text} and news" for text in texts if text])
    write_shards(work_on(source, tokenizer), tmp_path / "two")
    train_one, held_one, train_two, held_two = (
        {tuple(document) for document in documents_of(tmp_path / name, split)}
        for name in ("one", "two")
        for split in ("train", "validation")
    )
    assert not train_two & held_two
    assert train_one < train_two
    assert held_one < held_two


@pytest.mark.slow
def test_validation_files_are_held_out_wherever_else_they_stand(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, texts: list[str]
) -> None:
    held_out = [text for text in texts[190:210] if text] + ["only in validation"]
    valid = write_source(tmp_path / "valid.jsonl.gz", held_out)
    work = work_on(source, tokenizer, validation_files=find_files([valid]))
    manifest = write_shards(work, tmp_path / "out")
    expected = [[0, *tokenizer.encode(text)] for text in held_out]
    assert documents_of(tmp_path / "out", "validation") == expected
    rest = [[0, *tokenizer.encode(text)] for text in texts if text and text not in held_out]
    assert documents_of(tmp_path / "out", "train") == rest
    dropped = len([text for text in texts if text in held_out])
    assert manifest["skipped"] == {"empty": 6, "held_out": dropped}


@pytest.mark.slow
@pytest.mark.parametrize("explicit_validation", [False, True])
def test_stopped_at_every_write_it_is_resumed(
    tmp_path: Path,
    source: Path,
    tokenizer: Tokenizer,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    explicit_validation: bool,
) -> None:
    settings: dict[str, object] = {}
    if explicit_validation:
        valid = write_source(tmp_path / "valid.jsonl.gz", texts[100:160])
        settings["validation_files"] = find_files([valid])
    work = work_on(source, tokenizer, **settings)
    write_shards(work, tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    original = module.write_sealed
    for record_first in (False, True):  # stopped just before, and just after, a part is recorded
        folder = tmp_path / f"stopped-{record_first}"
        stops = 0
        while True:
            stop = stop_at(1 if record_first else 2, record_first, original)
            monkeypatch.setattr(module, "write_sealed", stop)
            try:
                write_shards(work, folder)
                break
            except Stopped:
                stops += 1
                assert stops < 100
        monkeypatch.setattr(module, "write_sealed", original)
        assert stops >= (len(json.loads(expected["manifest.json"])["shards"]["train"]) - 1)
        assert contents(folder) == expected


def stop_at(
    write: int, record_first: bool, original: Callable[[Path, Any], None]
) -> Callable[[Path, Any], None]:
    """`write_sealed` that stops the run at a write of the progress."""
    seen = 0

    def stop(path: Path, value: Any) -> None:
        nonlocal seen
        seen += path.name == "progress.json" and bool(value["parts"])
        if seen == write and not record_first:
            raise Stopped
        original(path, value)
        if seen == write:
            raise Stopped

    return stop


KILLED = """
    import sys
    from parcae.data import preparation, tokenizer as module
    module.BATCH_CHARACTERS = 20_000
    source, tokenizer, out = sys.argv[1:]
    write = preparation.write_sealed
    preparation.write_sealed = lambda *values: (write(*values), print("written", flush=True))
    preparation.prepare([source], tokenizer, out, shard_tokens=20_000, validation_fraction=0.1)
"""


@pytest.mark.slow
def test_killed_at_random_moments_it_is_resumed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chance = random.Random(3)
    words = ["loop", "state", "depth", "prelude", "coda", "norm", "token", "batch", "12", "!"]
    texts = [" ".join(chance.choices(words, k=400)) + f" {i}" for i in range(700)]
    source = write_source(tmp_path / "texts.jsonl.gz", texts)
    tokenizer.save(tmp_path / "tokenizer.json")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(source)]
    command.append(str(tmp_path / "tokenizer.json"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment)
    folder = tmp_path / "killed"
    kills = 0
    while True:
        process = subprocess.Popen([*command, str(folder)], env=environment, stdout=subprocess.PIPE)
        assert process.stdout
        for _ in range(chance.randint(1, 2)):  # one of about 16 parts
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.02))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        if not (folder / "manifest.json").exists():
            with pytest.raises(FileError, match="preparation is not finished"):
                ShardedDocuments.open(folder)
        assert kills < 50
    assert process.returncode == 0
    assert kills >= 4
    assert contents(folder) == contents(tmp_path / "whole")


class SmallDisk:
    """A stream on a disk that is full after so many bytes, as the kernel would have it."""

    def __init__(self, stream: object, room: list[int]) -> None:
        self._stream = stream
        self._room = room

    def write(self, data: memoryview) -> int:
        if self._room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._stream.write(data[: self._room[0]])  # type: ignore[attr-defined]
        self._room[0] -= written
        return written


@pytest.mark.slow
def test_a_full_disk_loses_nothing(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_on(source, tokenizer)
    write_shards(work, tmp_path / "whole")
    room = [0]
    original = ShardWriter.__init__

    def on_small_disk(self: ShardWriter, stream: object, *rest: object) -> None:
        original(self, SmallDisk(stream, room), *rest)  # type: ignore[arg-type]

    folder = tmp_path / "full"
    monkeypatch.setattr(ShardWriter, "__init__", on_small_disk)
    finished = -1
    for _ in range(50):
        room[0] = 9000
        try:
            write_shards(work, folder)
            break
        except FileError as error:
            message = str(error)
        assert re.search("No space left on device.*run the same command again", message)
        assert not list(folder.glob(".*.tmp"))
        parts = len(json.loads((folder / "progress.json").read_text())["parts"])
        assert parts > finished
        finished = parts
    assert finished > 2
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_bad_source_is_named_and_nothing_is_taken_for_finished(
    tmp_path: Path, source: Path, tokenizer: Tokenizer
) -> None:
    bad = source / "c.jsonl"
    bad.write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(FileError, match=r"^\S*c\.jsonl, line 2: no field 'text'.*`text_field`\.$"):
        write_shards(work_on(source, tokenizer), tmp_path / "out")
    with pytest.raises(FileError, match="preparation is not finished"):
        ShardedDocuments.open(tmp_path / "out")


@pytest.mark.slow
def test_a_folder_belongs_to_one_preparation(
    tmp_path: Path, source: Path, tokenizer: Tokenizer
) -> None:
    first = write_shards(work_on(source, tokenizer), tmp_path / "out")
    assert write_shards(work_on(source, tokenizer), tmp_path / "out") == first
    other = Tokenizer.train(["another text"], 270)
    for work in (
        work_on(source, tokenizer, shard_tokens=3000),
        work_on(source, tokenizer, validation_fraction=0.1),
        work_on(source, other),
    ):
        with pytest.raises(FileError, match="contains shards of other sources"):
            write_shards(work, tmp_path / "out")
    write_source(source / "a.jsonl.gz", ["changed"])
    with pytest.raises(FileError, match="contains shards of other sources"):
        write_shards(work_on(source, tokenizer), tmp_path / "out")


def test_two_processes_do_not_write_into_one_folder(
    tmp_path: Path, source: Path, tokenizer: Tokenizer
) -> None:
    with lock_folder(tmp_path / "out"), pytest.raises(FileError, match="another process"):
        write_shards(work_on(source, tokenizer), tmp_path / "out")


def test_sources_without_any_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_source(tmp_path / "empty.jsonl.gz", ["", ""])
    with pytest.raises(FileError, match="the sources contain no text"):
        write_shards(work_on(source, tokenizer), tmp_path / "out")


def test_settings_are_checked(source: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"validation_fraction: 1\.0 is out of range"):
        work_on(source, tokenizer, validation_fraction=1.0)
    with pytest.raises(ConfigError, match="shard_tokens: 0 is out of range"):
        work_on(source, tokenizer, shard_tokens=0)


@pytest.mark.slow
def test_a_large_vocabulary_takes_32_bits(tmp_path: Path, source: Path) -> None:
    big = Tokenizer.train(["text"], 260)
    tree = json.loads(big.content)
    for number in range(len(tree["model"]["vocab"]), 1 << 16 | 1):
        tree["model"]["vocab"][f"unused-{number}"] = number
    manifest = write_shards(work_on(source, Tokenizer(json.dumps(tree))), tmp_path / "out")
    assert manifest["dtype"] == "<u4"
    assert ShardedDocuments.open(tmp_path / "out").tokens(0).dtype == np.uint32


def test_short_documents_are_charged_for_what_python_keeps_of_them() -> None:
    """Two million letters, each a document of its own, once took 2 GiB."""
    limit = tokenizer_module.BATCH_CHARACTERS // 200 + 1
    empty = itertools.repeat(Document("", ReadPosition(), 0.0), 20_000)
    assert max(map(len, _batches(empty, lambda document: len(document.text)))) <= limit
    pieces = ((number, "") for number in range(20_000))
    assert max(map(len, _batches(pieces, lambda numbered: len(numbered[1])))) <= limit


MEASURED = """
    import sys
    from parcae.data.preparation import prepare
    source, tokenizer, out = sys.argv[1:]
    prepare([source], tokenizer, out)
    with open("/proc/self/status") as stream:  # ru_maxrss counts the parent's memory too
        print(1024 * next(int(line.split()[1]) for line in stream if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """8 MB in one line of words, and 2 MB in one word, stay far below the promised 1 GiB."""
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "giant.txt").write_text("words and more " * 530_000 + "\n" + "x" * 2_000_000)
    arguments = [str(tmp_path / name) for name in ("giant.txt", "tokenizer.json", "out")]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) < 700e6


@pytest.mark.slow
def test_the_split_depends_on_the_text_alone() -> None:
    texts = [f"document {i}" for i in range(20_000)]
    held_out = {text for text in texts if split_of(text, 0.05) == "validation"}
    assert 850 < len(held_out) < 1150  # five standard deviations around 1,000
    assert held_out == {text for text in reversed(texts) if split_of(text, 0.05) == "validation"}
    assert held_out < {text for text in texts if split_of(text, 0.1) == "validation"}
    assert not [text for text in texts if split_of(text, 0.0) == "validation"]
    assert content_key("a") == content_key("a") != content_key("b")


def test_a_renamed_source_folder_gives_the_same_order(tmp_path: Path) -> None:
    """The same shards, but for sources.json, which names the files."""
    batches, fingerprints = [], []
    for name in ("books", "texts"):
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i:02d}.txt").write_text(f"Text {i} " * (i + 1))
        out = tmp_path / f"{name}-shards"
        tokenizer = Tokenizer.train([f"Text {i} " for i in range(40)], 270)
        prepare([tmp_path / name], tokenizer, out, validation_fraction=0.0)
        config = LoaderConfig(context_length=15, global_batch=4, prefetch=0)
        with Loader([Source(ShardedDocuments.open(out), name=name)], config) as loader:
            batches.append(torch.cat([next(loader).inputs for _ in range(10)]))
        fingerprints.append(ShardedDocuments.open(out).fingerprint)
    assert torch.equal(*batches)
    assert fingerprints[0] == fingerprints[1]


def test_the_format_of_a_file_is_part_of_its_identity(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    for path in (text, records):
        path.write_text('{"text": "one"}\n{"text": "two"}\n')
    write_shards(work_on(text, tokenizer), tmp_path / "out")
    with pytest.raises(FileError, match="contains shards of other sources"):
        write_shards(work_on(records, tokenizer), tmp_path / "out")
