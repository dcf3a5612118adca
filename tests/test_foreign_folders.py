"""Folders that somebody else has made: nothing outside of them is written, deleted or waited for.

What is tried here by name is tried on every command in tests/faults, and with random files in
tests/fuzz.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

import parcae
from conftest import randomised, tiny
from parcae import cli, files
from parcae.data.preparation import remove_prepared
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError
from parcae.hub.export import export
from parcae.recipe import merge
from parcae.runs import last_step, read_metrics, read_status
from parcae.runs.checkpoints import last_state
from parcae.sweeps.launch import last_line
from training import runs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links, pipes and modes")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, with a copy of its tokens, made under a umask of its own."""
    folder = tmp_path_factory.mktemp("trained")
    tree = merge(runs.TREE, {"data": {"sources": [str(runs.write_text(folder))]}})
    changes = {"telemetry_every": 0, "checkpoint_every": 1}
    before = os.umask(0o027)
    try:
        parcae.train(merge(tree, {"budget": {"steps": 2}, "run": changes}), out=folder / "run")
    finally:
        os.umask(before)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained / "run", tmp_path / "run")


@pytest.fixture
def outside(trained, tmp_path):
    """What belongs to the user: a run, of which nothing may change."""
    folder = shutil.copytree(trained / "run", tmp_path / "outside")
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "result.json").write_text("{}")
    (folder / "data" / "0" / "thesis.txt").write_text("mine")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fails(capsys, *words) -> str:
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("parcae: ")
    assert error.count("\n") == 1, error
    return error


def link(path: Path, target: Path) -> None:
    files.remove(path)
    path.symlink_to(target)


def test_a_temporary_file_is_new_and_has_a_name_that_nobody_knows(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("mine")
    names = set()
    for _ in range(2):
        with files.atomic_path(tmp_path / "note.txt") as temporary:
            names.add(temporary.name)
    assert len(names) == 2
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    planted = files.temporary_path(tmp_path / "note.txt")
    planted.symlink_to(target)
    with pytest.raises(FileError, match="File exists"):
        files.write_text(tmp_path / "note.txt", "theirs")
    assert target.read_text() == "mine"


def test_a_link_to_a_file_is_replaced(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "depth.png").symlink_to(tmp_path / "target")
    files.write_text(tmp_path / "depth.png", "theirs")
    assert not (tmp_path / "depth.png").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"


def test_what_is_left_over_is_removed_but_no_link_is_followed(tmp_path):
    inside, target = tmp_path / "run", tmp_path / "target"
    for folder in (inside, target):
        folder.mkdir()
    (target / "file").write_text("mine")
    names = [f".a.{os.uname().nodename}-{2**22 + 1}.{n:016x}.tmp" for n in range(2)]
    (inside / names[0]).symlink_to(target)
    (inside / names[1]).symlink_to(target / "file")
    files.write_text(inside / "note.txt", "text")
    assert [path.name for path in inside.iterdir()] == ["note.txt"]
    assert (target / "file").read_text() == "mine"


def test_a_folder_of_a_similar_name_is_not_left_over(tmp_path):
    folder = tmp_path / f".backup.{os.uname().nodename}-{2**22 + 1}.tmp"
    folder.mkdir()
    os.utime(folder, (0, 0))
    files.write_text(tmp_path / "note.txt", "text")
    assert folder.is_dir()


def test_a_hard_link_is_not_written_to(tmp_path):
    (tmp_path / "target").write_text("mine")
    for name in (".lock", "metrics.jsonl"):
        os.link(tmp_path / "target", tmp_path / name)
    with pytest.raises(FileError, match="hard link"), files.lock_folder(tmp_path):
        pass
    with pytest.raises(FileError, match="hard link"):
        files.no_link(str(tmp_path / "metrics.jsonl"), os.O_WRONLY)
    assert (tmp_path / "target").read_text() == "mine"


LINKS = (
    "checkpoints",
    "data",
    "checkpoints/.step-00000003",
    "tensorboard",
    "metrics.jsonl",
    ".lock",
)


def test_a_link_to_itself(trained, tmp_path, capsys):
    out = tmp_path / "shards"
    out.symlink_to(out)
    words = ("data", "prepare", trained / "text.jsonl", "--tokenizer", trained / "run")
    assert "shards" in fails(capsys, *words, "--out", out)


@pytest.mark.parametrize("name", LINKS)
def test_a_run_with_a_link_out_of_it_is_not_resumed(name, run, outside, capsys):
    link(run / name, outside / name)
    before = contents(run)
    error = fails(capsys, "train", "--resume", run)
    assert f"{run / name}: a link that leads out of {run}, to {outside / name}." in error
    assert "--follow-links" in error
    assert contents(run) == before


def test_links_of_trackers(tmp_path):
    logs = tmp_path / "run" / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "cache.log")
    files.check_links(tmp_path / "run")
    (logs / "y").symlink_to(tmp_path)
    with pytest.raises(FileError, match="y: a link that leads out"):
        files.check_links(tmp_path / "run")
    files.remove(tmp_path / "run" / "wandb")
    (tmp_path / "run" / "wandb").symlink_to(tmp_path)
    with pytest.raises(FileError, match="wandb: a link that leads out"):
        files.check_links(tmp_path / "run")


@pytest.mark.slow
def test_links_that_are_meant(run, trained, tmp_path):
    """`data` and `checkpoints` on another disk."""
    (tmp_path / "disk").mkdir()
    for name in ("data", "checkpoints"):
        shutil.move(run / name, tmp_path / "disk" / name)
        (run / name).symlink_to(tmp_path / "disk" / name)
    (tmp_path / "disk" / "checkpoints" / ".step-00000003").symlink_to(trained)
    before = contents(trained)
    result = parcae.train(run, resume=True, follow_links=True)
    assert result.status == "finished"
    assert (run / "checkpoints").is_symlink()
    assert not (run / "checkpoints" / ".step-00000003").is_symlink()
    assert contents(trained) == before


def test_a_link_to_data_is_not_emptied(trained, run, outside):
    """By a run that never reached its first step and is started with another recipe."""
    for path in run.iterdir():
        if path.name not in ("recipe.toml", "tokenizer.json"):
            files.remove(path)
    link(run / "data", outside / "data")
    tree = merge(runs.TREE, {"data": {"sources": [str(trained / "text.jsonl")]}})
    with pytest.raises(FileError, match=r"data: a link that leads out of .*`follow_links`"):
        parcae.train(tree, out=run)


def test_only_what_a_preparation_wrote_is_deleted(run):
    folder = run / "data" / "0"
    (folder / "thesis.txt").write_text("mine")
    remove_prepared(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    (folder / "manifest.json").write_text("{}")
    (folder / "train-00000.shard").write_text("mine")
    remove_prepared(folder)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("report", ("report", "RUN")),
        ("evaluation", ("eval", "RUN")),
        ("fit", ("fit", "RUN")),
        ("logs", ("sweep", "RUN")),
        ("data", ("reproduce", "prelude-norm", "--scale", "toy", "--out", "RUN")),
        ("runs/a", ("sweep", "RUN")),
        ("recipes/wandb/a", ("sweep", "RUN")),
    ],
)
def test_commands_do_not_write_through_links(name, words, run, outside, capsys):
    if words[0] in ("fit", "sweep"):
        write_sweep(run)
        (outside / name).mkdir(parents=True, exist_ok=True)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    link(run / name, outside / name)
    error = fails(capsys, *(run if word == "RUN" else word for word in words))
    assert f"{run / name}: a link that leads out of {run}, to {outside / name}." in error


def write_sweep(folder: Path) -> None:
    from parcae.experiments.paper_runs import paper_table
    from parcae.laws.table import write_table

    write_table(folder / "runs.csv", paper_table(("140m",)))
    files.write_sealed(folder / "sweep.json", {"format": 1, "runs": []})


def test_files_that_grow_follow_no_link(tmp_path):
    """Even where the check was passed before the link was made."""
    from parcae.evaluation.results import Samples, format_record
    from parcae.training.log import Log

    (tmp_path / "target").write_text("mine")
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    with pytest.raises(FileError, match="a link or a pipe, not a file"):
        files.no_link(tmp_path / "metrics.jsonl", os.O_WRONLY)
    Log(tmp_path).close()  # replaces the link
    files.write_sealed(tmp_path / "settings.json", {})
    record = {"task": "a", "seed": None, "data": "d", "index": 0, "loops": [1]}
    (tmp_path / "target").write_text(f"{format_record(record)}\nhalf")
    before = (tmp_path / "target").read_text()
    with pytest.raises(FileError, match="a link or a pipe, not a file"):
        Samples(tmp_path, {})
    assert (tmp_path / "target").read_text() == before


def endless(path: Path, kind: str) -> None:
    files.remove(path)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as stream:
            stream.truncate(6 << 30)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_files_of_a_run_without_an_end(kind, run, tmp_path, capsys):
    endless(run / "metrics.jsonl", kind)
    expected = "at most" if kind == "sparse" else "a pipe or a device"
    assert last_step(run) == 0
    for words in (
        ("report", run),
        ("compare", run, run),
        ("train", "--resume", run, "--follow-links"),
    ):
        assert expected in fails(capsys, *words)
    with pytest.raises(FileError, match=expected):
        read_metrics(run)
    endless(run / "result.json", kind)
    with pytest.raises(FileError, match=expected):
        read_status(run)
    for state in run.glob("checkpoints/*/state.json"):
        endless(state, kind)
    assert last_state(run) is None
    endless(tmp_path / "log", kind)
    assert last_line(tmp_path / "log") == ""
    endless(tmp_path / "tokenizer.json", kind)
    with pytest.raises(FileError, match=expected):
        Tokenizer.load(tmp_path)


def test_a_line_without_an_end(tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as stream:
        stream.truncate(files.LARGEST_LINE + 1)
    with pytest.raises(FileError, match="a line of more than 16 MiB"):
        read_metrics(tmp_path)


@pytest.mark.slow
def test_modes_of_files_are_those_of_the_umask(trained, tmp_path):
    assert modes(trained / "run") == {0o640}
    before = os.umask(0o002)
    try:
        model = parcae.save(randomised(tiny(vocab_size=300)), tmp_path / "model")
        shutil.copyfile(trained / "run" / "tokenizer.json", model / "tokenizer.json")
        export(model, tmp_path / "exported")
    finally:
        os.umask(before)
    assert modes(model) == modes(tmp_path / "exported") == {0o664}


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
