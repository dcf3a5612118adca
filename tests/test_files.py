"""Writes are whole or absent; a folder belongs to one process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from parcae import files
from parcae.files import FileError


def test_atomic_write_replaces_whole(tmp_path):
    path = tmp_path / "deep" / "note.txt"
    files.write_text(path, "first")
    with pytest.raises(RuntimeError), files.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "first"
    assert [p.name for p in path.parent.iterdir()] == ["note.txt"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "note.txt"
    files.write_text(path, "old")
    script = (
        "import sys, time; from parcae.files import atomic_path\n"
        f"with atomic_path({str(path)!r}) as t:\n"
        "    t.write_text('half'); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.read_text() == "old"
    (left,) = tmp_path.glob(".*.tmp")
    files._remove_abandoned.cache_clear()
    files.write_text(tmp_path / "other.txt", "the next process removes what it left")
    assert not left.exists()


def test_temporary_files_that_may_be_in_use_stay(tmp_path):
    old = tmp_path / f".old.txt.elsewhere-{2**22 + 1}.{7:016x}.tmp"
    kept = [
        tmp_path / f".note.txt.elsewhere-{2**22 + 1}.{7:016x}.tmp",  # of another machine
        tmp_path
        / f".note.txt.{platform.node()}-{os.getppid()}.{7:016x}.tmp",  # of a process that exists
        tmp_path / ".notes.tmp",  # not one of ours
    ]
    for path in (old, *kept):
        path.touch()
    os.utime(old, (0, 0))
    files.write_text(tmp_path / "note.txt", "text")
    assert not old.exists()
    assert all(path.exists() for path in kept)


def test_unwritable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((FileError, OSError)):
        files.write_text(tmp_path / "file" / "below.txt", "x")


def test_json_is_strict(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})
    files.write_json(tmp_path / "a.json", {"x": None})
    assert files.read_json(tmp_path / "a.json") == {"x": None}
    (tmp_path / "a.json").write_text('{"x": ')
    with pytest.raises(FileError, match="truncated"):
        files.read_json(tmp_path / "a.json")


def test_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert files.sha256(tmp_path / "x").startswith("ba7816bf8f01cfea")


@pytest.mark.slow
def test_a_folder_is_held_by_one_process(tmp_path):
    script = f"from parcae.files import lock_folder\nwith lock_folder({str(tmp_path)!r}): pass"
    with files.lock_folder(tmp_path):
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert result.returncode != 0
        assert f"another process ({os.getpid()})" in result.stderr
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    script = (
        f"import time; from parcae.files import lock_folder\nwith lock_folder({str(tmp_path)!r}):\n"
        "    print('locked', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    assert files.is_in_use(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not files.is_in_use(tmp_path)
    with files.lock_folder(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_sealed_file_is_read_as_it_was_written_or_not_at_all(tmp_path):
    path = tmp_path / "record.json"
    files.write_sealed(path, {"parts": [{"tokens": 12}], "name": "x"})
    assert files.read_sealed(path, "Start anew.") == {"parts": [{"tokens": 12}], "name": "x"}
    text = path.read_text()
    for other in (text.replace("12", "13"), text.replace("name", "nome"), "[1]", "{}", text[:-9]):
        path.write_text(other)
        with pytest.raises(FileError, match=r"record\.json: (changed since|not valid JSON)"):
            files.read_sealed(path, "Start anew.")


def test_a_folder_that_cannot_be_held_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FileError, match="a file, not a folder"),
        files.lock_folder(tmp_path / "file"),
    ):
        pass
    below = tmp_path / "file" / "below"
    with pytest.raises(FileError, match="could not be written"), files.lock_folder(below):
        pass


def test_a_folder_on_a_full_disk_is_a_clear_error(tmp_path):
    """Not a byte may be written, as on a disk without room."""
    script = (
        "import resource; from parcae.files import FileError, lock_folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n"
        f"    with lock_folder({str(tmp_path / 'run')!r}): pass\n"
        "except FileError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "run: could not be written (File too large)" in result.stdout


def test_what_cannot_be_read_is_named(tmp_path):
    for read in (files.sha256, files.read_json):
        with pytest.raises(FileError, match="no such file"):
            read(tmp_path / "missing")
        with pytest.raises(FileError, match="cannot be read"):
            read(tmp_path)
    (tmp_path / "long.json").write_text("9" * 5000)
    with pytest.raises(FileError, match="not valid JSON"):
        files.read_json(tmp_path / "long.json")


def test_a_new_folder_is_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "model"
    with pytest.raises(RuntimeError), files.atomic_folder(path) as new:
        (new / "half").write_text("half")
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    with files.atomic_folder(path) as new:
        (new / "whole").write_text("whole")
        assert not path.exists()
    assert (path / "whole").read_text() == "whole"
    with pytest.raises(FileError, match="model: exists"), files.atomic_folder(path):
        pass


def test_the_faster_of_two_processes_makes_a_folder(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(FileError, match="model: exists"), files.atomic_folder(path) as new:
        (new / "file").touch()
        path.mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / f".model.{platform.node()}-{2**22 + 1}.{7:016x}.tmp"
    left.mkdir()
    (left / "file").touch()
    with files.atomic_folder(tmp_path / "model"):
        pass
    assert not left.exists()
