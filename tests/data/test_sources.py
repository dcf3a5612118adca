"""Names, folders and globs to files in a fixed order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parcae.config import ConfigError
from parcae.data.readers import read_documents
from parcae.data.sources import ReadOptions, find_files
from parcae.files import FileError


def write_records(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_folders_of_globs_links_and_hidden_files(tmp_path: Path) -> None:
    for name in ("g/a/1.jsonl", "g/b/2.jsonl", "g/3.jsonl", "elsewhere/4.jsonl", "g/.5.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_records(tmp_path / name, [name])
    (tmp_path / "g/nothing").mkdir()

    def found(source: Path | str) -> list[str]:
        return [file.path.name for file in find_files([source])]

    assert found(f"{tmp_path}/g/*/") == ["1.jsonl", "2.jsonl"]
    assert found(f"{tmp_path}/g/*") == ["3.jsonl", "1.jsonl", "2.jsonl"]
    (tmp_path / "g/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "g")
    assert found(tmp_path / "g") == ["3.jsonl", "1.jsonl", "2.jsonl", "4.jsonl"]
    (tmp_path / "g/gone.jsonl").symlink_to(tmp_path / "missing")
    with pytest.raises(FileError, match=r"gone\.jsonl: no such file"):
        found(tmp_path / "g")


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="parcae data download"):
        find_files([tmp_path / "missing*.txt"])
    with pytest.raises(FileError, match="no readable file in this folder"):
        find_files([tmp_path])
    with pytest.raises(FileError, match="sources: none given"):
        find_files([])
    with pytest.raises(FileError, match="sources: empty name"):
        find_files([""])
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        ReadOptions(document_start="(")


@pytest.mark.slow
def test_builtin_is_the_library_alone_and_always_the_same() -> None:
    files = find_files(["builtin"])
    names = [file.name for file in files]
    assert files == find_files(["builtin"])
    assert len(set(names)) == len(names) > 300
    assert "python/argparse.py" in names
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    documents = list(read_documents(files, ReadOptions()))
    assert sum(len(document.text) for document in documents) > 5_000_000
    topics = [d.text for d in documents if files[d.next_position.file].format == "topics"]
    assert any("lambda" in topic for topic in topics)


def test_a_task_is_no_file():
    with pytest.raises(FileError, match=r"task:walks: a task is not a file. Name it in a recipe"):
        find_files(["task:walks"])


def test_a_search_ends(tmp_path, monkeypatch):
    """A link to a folder above it would be followed forever."""
    (tmp_path / "a").mkdir()
    write_records(tmp_path / "a" / "1.jsonl", ["text"])
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    for source in (
        tmp_path,
        f"{tmp_path}/**",
        f"{tmp_path}/**/*.jsonl",
        f"{tmp_path}/*/*/*/*.jsonl",
    ):
        assert [file.path.name for file in find_files([source])] == ["1.jsonl"]
    monkeypatch.setattr("parcae.data.sources.MOST_ENTRIES", 3)
    for index in range(4):
        (tmp_path / f"{index}").touch()
    for source in (tmp_path, f"{tmp_path}/**", f"{tmp_path}/*", f"{tmp_path}/**/*.jsonl"):
        with pytest.raises(FileError, match="more than 3 files and folders to search"):
            find_files([source])
