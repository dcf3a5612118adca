"""Evaluation tasks downloaded from a local server that fails on demand."""

from __future__ import annotations

import gzip
import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from parcae import cli
from parcae.config import ConfigError
from parcae.data.downloads import RemoteFile
from parcae.evaluation import suites
from parcae.evaluation.suites import files_of
from parcae.evaluation.tasks import (
    ELSEWHERE,
    NO_CHECKSUM,
    Task,
    core_extended,
    download_tasks,
    files_of_tasks,
    find,
    locate,
    tasks_named,
)
from parcae.files import FileError

UNVERIFIABLE = {"mmlu_zeroshot", "mmlu_fewshot", "squad", "bbq", "bigbench_elementary_math_qa"}


class SmallMirror(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Files)
        self.files: dict[str, bytes] = {}
        self.damage: set[str] = set()
        self.drop_after: list[int] = []
        """Each transfer takes one of these numbers and breaks after so many bytes."""
        self.requests: list[tuple[str, str | None]] = []
        self.headers_seen: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/tasks"


class Files(BaseHTTPRequestHandler):
    server: SmallMirror  # type: ignore[assignment]

    def do_GET(self) -> None:
        name, asked = self.path.removeprefix("/tasks/"), self.headers.get("Range")
        self.server.requests.append((name, asked))
        self.server.headers_seen |= {key.lower() for key in self.headers}
        data = self.server.files.get(name, b"")
        if name in self.server.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if asked is not None:
            data = data[int(asked.removeprefix("bytes=").rstrip("-")) :]
        self.send_response(404 if not data else 200 if asked is None else 206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        drop = self.server.drop_after.pop(0) if self.server.drop_after else len(data)
        self.wfile.write(data[:drop])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallMirror]:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    mirror = SmallMirror()
    threading.Thread(target=mirror.serve_forever, daemon=True).start()
    yield mirror
    mirror.shutdown()
    mirror.server_close()


@pytest.fixture
def tasks(server: SmallMirror) -> tuple[Task, ...]:
    """Tasks of the table with made-up contents, and one without a checksum."""
    chance = random.Random(2)
    made = []
    for task in tasks_named(["copa", "hellaswag", "hellaswag_zeroshot", "lambada_openai"]):
        data = server.files.setdefault(task.file, chance.randbytes(20_000 + len(task.file)))
        made.append(replace(task, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data)))
    return (*made, *tasks_named(["squad"]))


def here(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_files_arrive_once_and_are_found(server, tasks, tmp_path):
    found = files_of_tasks(tasks)
    assert found.omitted == {NO_CHECKSUM: ("squad",)}
    download_tasks(found.files, tmp_path, collection=server.address)
    assert here(tmp_path) == server.files
    for task in tasks[:-1]:
        assert locate(task, tmp_path) == tmp_path / task.file
    assert sorted(server.requests) == [(name, None) for name in sorted(server.files)]
    download_tasks(found.files, tmp_path, collection=f"{server.address}/")
    assert len(server.requests) == 3


@pytest.mark.slow
def test_the_token_of_the_hub_stays_with_the_hub(server, tasks, tmp_path):
    download_tasks(files_of_tasks(tasks).files, tmp_path, collection=server.address)
    assert "host" in server.headers_seen
    assert not server.headers_seen & {"authorization", "cookie"}


@pytest.mark.slow
def test_a_broken_connection_and_a_killed_download_resume(server, tasks, tmp_path):
    class Killed(BaseException):
        pass

    def kill(file: RemoteFile, bytes_here: int) -> None:
        if file.path == tasks[1].file and bytes_here >= 12_000:
            raise Killed

    files = files_of_tasks(tasks).files
    server.drop_after = [5_000]
    with pytest.raises(Killed):
        download_tasks(files, tmp_path, collection=server.address, report=kill)
    assert server.requests[1] == (tasks[0].file, "bytes=5000-")
    assert not (tmp_path / tasks[1].file).exists()
    server.requests.clear()
    download_tasks(files, tmp_path, collection=server.address)
    assert server.requests[0] == (tasks[1].file, "bytes=12000-")
    assert here(tmp_path) == server.files


@pytest.mark.slow
def test_a_damaged_file_never_gets_its_name(server, tasks, tmp_path):
    files = files_of_tasks(tasks).files
    server.damage.add(tasks[1].file)
    with pytest.raises(FileError, match=r"sent by 127\.0\.0\.1 has a wrong checksum"):
        download_tasks(files, tmp_path, collection=server.address)
    assert list(here(tmp_path)) == [tasks[0].file]
    server.damage.clear()
    download_tasks(files, tmp_path, collection=server.address)
    assert here(tmp_path) == server.files


@pytest.mark.slow
def test_a_file_with_another_content_is_kept(server, tasks, tmp_path):
    own = tmp_path / tasks[1].file
    own.parent.mkdir(parents=True)
    own.write_text("my own version")
    with pytest.raises(FileError, match=r"hellaswag\.jsonl: exists with another content"):
        download_tasks(files_of_tasks(tasks).files, tmp_path, collection=server.address)
    assert own.read_text() == "my own version"
    assert not server.requests


@pytest.mark.slow
def test_no_network_no_file_and_no_address(server, tasks, tmp_path):
    files = files_of_tasks(tasks).files
    with pytest.raises(ConfigError, match=r"mirror: 'data/tasks' is not an http"):
        download_tasks(files, tmp_path, collection="data/tasks")
    del server.files[tasks[0].file]
    with pytest.raises(FileError, match=r"copa\.jsonl: refused by 127\.0\.0\.1.*404"):
        download_tasks(files, tmp_path, collection=server.address)
    server.shutdown()
    server.server_close()
    with pytest.raises(FileError, match=r"cannot reach 127\.0\.0\.1.*Check the network"):
        download_tasks(files, tmp_path, collection=server.address)


def test_files_of_suites():
    core, extended = files_of("core"), files_of("core-extended")
    assert {file.path for file in core.files} < {file.path for file in extended.files}
    assert set(extended.omitted[NO_CHECKSUM]) == UNVERIFIABLE
    assert core.omitted == {NO_CHECKSUM: ("squad",)}
    lambada = "language_understanding/lambada_openai.jsonl"
    assert [file.path for file in files_of("lambada").files] == [lambada]
    assert len(files_of("zero-shot").files) == 4
    assert files_of("zero-shot").omitted == {ELSEWHERE: ("piqa", "sciq")}
    with pytest.raises(ConfigError, match="Did you mean core"):
        files_of("cores")


@pytest.mark.slow
def test_the_command(server, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suites, "core", lambda: tasks)
    arguments = ["data", "download", "core", "--out", str(tmp_path), "--mirror", server.address]
    assert cli.main(arguments) == 0
    message = capsys.readouterr()
    assert "core: 3 files downloaded and verified, 58.7 KiB." in message.out
    assert "Not downloaded: squad (no known checksum" in message.out
    assert f"--suites core --task-data {tmp_path}" in message.out
    assert f"{tasks[0].file}: 19.6 KiB" in message.err
    assert here(tmp_path) == server.files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cor"], "Did you mean core"),
        (["core", "--first-files", "2"], "Omit them"),
        (["core", "--mirror", "nowhere"], "not an http(s) address"),
        (["someone/texts", "--mirror", "http://127.0.0.1"], "HF_ENDPOINT"),
    ],
)
def test_errors_in_arguments_of_download(arguments, message, tmp_path, capsys):
    assert cli.main(["data", "download", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_has_the_sizes_and_checksums_of_the_files(shared_data):
    """Every file with a checksum, uncompressed."""
    folder = shared_data / "data"
    seen = 0
    for file in files_of("core-extended").files:
        path = find(folder, file.path)
        assert path is not None, file.path
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.bytes, file.sha256), file.path
        seen += 1
    assert seen == 40
    assert {task.name for task in core_extended() if task.bytes is None} == UNVERIFIABLE
