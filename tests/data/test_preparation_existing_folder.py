"""Preparing into a folder that is not empty: damage is found, and other files are not touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from preparing import (
    Stopped,
    contents,
    small_texts,
    small_tokenizer,
    work_on,
    write_source,
    write_sources,
)

from parcae.data.preparation import Update, write_shards
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, write_sealed


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return small_texts()


@pytest.fixture
def source(tmp_path: Path, texts: list[str]) -> Path:
    return write_sources(tmp_path / "source", texts)


def shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.shard"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "flipped inside": lambda path: path.write_bytes(
        path.read_bytes()[:20] + b"?" + path.read_bytes()[21:]
    ),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_is_made_again_when_the_run_is_resumed(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, damage: str
) -> None:
    work, folder = work_on(source, tokenizer), tmp_path / "out"
    write_shards(work, tmp_path / "whole")

    def stop(update: Update) -> None:
        if update.tokens > 7000:
            raise Stopped

    with pytest.raises(Stopped):
        write_shards(work, folder, stop)
    assert len(json.loads((folder / "progress.json").read_text())["parts"]) >= 3
    DAMAGE[damage](folder / "train-00001.shard")
    (folder / "tokenizer.json").write_text("{}")
    write_shards(work, folder)
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_a_finished_folder_is_looked_at_again(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, damage: str
) -> None:
    work, folder = work_on(source, tokenizer), tmp_path / "out"
    write_shards(work, folder)
    for name in (*shard_names(folder), "sources.json", "tokenizer.json"):
        before = (folder / name).read_bytes()
        DAMAGE[damage](folder / name)
        with pytest.raises(FileError, match=name):
            write_shards(work, folder)
        (folder / name).write_bytes(before)
    write_shards(work, folder)


@pytest.mark.slow
def test_a_shard_lost_during_the_run_is_noticed(
    tmp_path: Path, source: Path, tokenizer: Tokenizer
) -> None:
    work, folder = work_on(source, tokenizer), tmp_path / "out"

    def lose(update: Update) -> None:
        if update.tokens > 5000:
            (folder / "train-00000.shard").unlink(missing_ok=True)

    with pytest.raises(
        FileError, match=r"train-00000\.shard: damaged \(missing\).*again to resume"
    ):
        write_shards(work, folder, lose)
    write_shards(work, folder)
    write_shards(work, tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_source_that_changes_during_the_run(
    tmp_path: Path, source: Path, tokenizer: Tokenizer
) -> None:
    work, folder = work_on(source, tokenizer), tmp_path / "out"

    def touch(update: Update) -> None:
        if update.activity == "tokenising":
            os.utime(source / "b.jsonl.gz", (1, 1))

    def change(update: Update) -> None:
        if update.activity == "tokenising":
            write_source(source / "b.jsonl.gz", ["changed"])

    with pytest.raises(FileError, match=r"b\.jsonl\.gz: changed while it was read"):
        write_shards(work, folder, touch)
    write_shards(work, folder)  # the content is the same
    with pytest.raises(FileError, match=r"b\.jsonl\.gz: changed while it was read"):
        write_shards(work, tmp_path / "other", change)
    with pytest.raises(FileError, match="contains shards of other sources"):
        write_shards(work, tmp_path / "other")


def test_files_of_others_are_left_alone(tmp_path: Path, source: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    mine = {"tokenizer.json": "mine", ".notes.tmp": "mine too"}
    for name, text in mine.items():
        (folder / name).write_text(text)
    work = work_on(source, tokenizer)
    with pytest.raises(FileError, match=r"mine: contains other files, such as \.notes\.tmp"):
        write_shards(work, folder)
    for name in ("progress.json", "manifest.json"):
        (folder / name).write_text("[1]")
        with pytest.raises(
            FileError, match=f"{name}: changed since it was written, or not by parcae"
        ):
            write_shards(work, folder)
    assert {name: (folder / name).read_text() for name in mine} == mine


@pytest.mark.slow
def test_what_a_kill_leaves_in_a_new_folder_is_ours(
    tmp_path: Path, source: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in (".lock", ".progress.json.host.name-123.tmp", ".train-00000.shard.tmp"):
        (folder / name).write_text("half")
    write_shards(work_on(source, tokenizer), folder)
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.slow
def test_the_output_is_no_source(tmp_path: Path, source: Path, tokenizer: Tokenizer) -> None:
    work = work_on(source, tokenizer)
    for inside in (source, source / "out", source / "deep/out"):
        with pytest.raises(FileError, match=r"inside the source .*Choose another folder"):
            write_shards(work, inside)
    file = work_on(source / "a.jsonl.gz", tokenizer)
    with pytest.raises(FileError, match=r"contains a source file.*Choose another folder"):
        write_shards(file, source)
    write_shards(file, source / "out")  # beside a file that was named is a good place


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("parts"),
        lambda state: state.update(parts=[{}]),
        lambda state: state.update(parts={}),
        lambda state: state.update(digests=[]),
        lambda state: state["parts"][0].update(behind=["0", 0, 0]),
        lambda state: state["parts"][0]["skipped"].update(empty=None),
        lambda state: state["parts"][0]["shards"][0].update(split="other"),
    ],
)
def test_a_state_of_wrong_types(
    tmp_path: Path, source: Path, tokenizer: Tokenizer, change: Callable[[dict], object]
) -> None:
    work, folder = work_on(source, tokenizer), tmp_path / "out"

    def stop(update: Update) -> None:
        if update.tokens > 3000:
            raise Stopped

    with pytest.raises(Stopped):
        write_shards(work, folder, stop)
    state = json.loads((folder / "progress.json").read_text())
    del state["seal"]
    change(state)
    write_sealed(folder / "progress.json", state)
    with pytest.raises(FileError, match=r"progress\.json: a value is missing or wrong"):
        write_shards(work, folder)
