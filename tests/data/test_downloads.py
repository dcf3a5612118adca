"""Downloads through the real client, from a local server with faults to switch on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parcae.config import ConfigError
from parcae.data import downloads
from parcae.data.downloads import RemoteFile, download, resolve
from parcae.data.preparation import prepare
from parcae.data.sources import find_files
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, write_sealed

COMMIT = "c0ffee" + "0" * 34
REPOSITORY = "someone/texts"


class SmallHub(ThreadingHTTPServer):
    """The three routes a download needs, with faults to switch on."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.files: dict[str, bytes] = {}
        self.drop_after: list[int] = []
        """Each transfer takes one number from here and breaks after so many bytes."""
        self.damage: set[str] = set()
        self.ignores_ranges = False
        self.instead: bytes | None = None
        """What a login page in between sends for every file."""
        self.states_lengths = True
        self.requests: list[tuple[str, str | None]] = []
        self.tokens: set[str | None] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def tree(self, folder: str) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = [{"type": "directory", "path": folder, "oid": "0"}]
        for path, data in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, object] = {
                "type": "file",
                "path": path,
                "size": len(data),
                "oid": blob,
            }
            if path.endswith(".parquet"):
                oid = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
            if path.startswith(folder):
                entries.append(entry)
        return entries


class Routes(BaseHTTPRequestHandler):
    server: SmallHub  # type: ignore[assignment]

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        tree, content = (
            f"/api/datasets/{REPOSITORY}/tree/{COMMIT}",
            f"/datasets/{REPOSITORY}/resolve",
        )
        if path == f"/api/datasets/{REPOSITORY}/revision/main":
            self.answer(200, json.dumps({"id": REPOSITORY, "sha": COMMIT}).encode())
        elif path.startswith(tree):
            self.answer(200, json.dumps(self.server.tree(path[len(tree) :].strip("/"))).encode())
        elif path.startswith(f"{content}/{COMMIT}/"):
            self.send_file(path[len(f"{content}/{COMMIT}/") :])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send_file(self, name: str) -> None:
        asked = self.headers.get("Range")
        self.server.requests.append((name, asked))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.instead is not None:
            self.answer(200, self.server.instead)
            return
        data = self.server.files[name]
        if name in self.server.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        ranged = asked is not None and not self.server.ignores_ranges
        if ranged:
            data = data[int(asked.removeprefix("bytes=").rstrip("-")) :]  # type: ignore[union-attr]
        drop = self.server.drop_after.pop(0) if self.server.drop_after else len(data)
        self.answer(206 if ranged else 200, data, drop)

    def answer(self, status: int, data: bytes, drop: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if self.server.states_lengths:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:drop])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    small = SmallHub()
    chance = random.Random(1)
    for number in range(3):
        small.files[f"sample/10BT/{number}.parquet"] = chance.randbytes(50_000 + number)
    small.files["sample/10BT/README.md"] = b"not a document"
    small.files["sample/10BT/dataset_infos.json"] = b'{"default": {}}'
    small.files["sample/10BT/LICENSE.txt"] = b"not a document either"
    small.files["notes/few.jsonl"] = b'{"text": "kept inside git"}\n'
    small.files["notes/dataset_infos.json"] = b'{"default": {}}'
    small.files["notes/empty.jsonl"] = b""
    thread = threading.Thread(target=small.serve_forever, daemon=True)
    thread.start()
    yield small
    small.shutdown()
    small.server_close()


def fetch(
    server: SmallHub, folder: Path, inside: str = "sample/10BT", **options: object
) -> downloads.Dataset:
    name = f"{REPOSITORY}:{inside}"
    return download(name, folder, endpoint=server.endpoint, **options)  # type: ignore[arg-type]


def here(folder: Path) -> dict[str, bytes]:
    inside = folder / "sample/10BT"
    return {f"sample/10BT/{p.name}": p.read_bytes() for p in inside.iterdir()}


def documents(server: SmallHub) -> dict[str, bytes]:
    return {name: data for name, data in server.files.items() if name.endswith(".parquet")}


@pytest.mark.slow
def test_all_files_arrive_once(server: SmallHub, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def report(file: RemoteFile, bytes_here: int) -> None:
        seen.append((file.path, bytes_here))

    dataset = fetch(server, tmp_path, report=report)
    assert here(tmp_path) == documents(server)
    assert dataset.commit == COMMIT
    assert dataset.bytes == sum(map(len, documents(server).values()))
    assert ("sample/10BT/1.parquet", 50_001) in seen
    asked = len(server.requests)
    fetch(server, tmp_path)
    assert len(server.requests) == asked
    assert {file.path.name for file in find_files([tmp_path])} == {
        Path(name).name for name in documents(server)
    }


@pytest.mark.slow
def test_what_was_downloaded_can_be_prepared(server: SmallHub, tmp_path: Path) -> None:
    for number in range(3):
        sink = io.BytesIO()
        texts = [f"document {number} {i}" for i in range(20)]
        pq.write_table(pa.table({"text": texts}), sink)
        server.files[f"sample/10BT/{number}.parquet"] = sink.getvalue()
    fetch(server, tmp_path / "downloaded")
    tokenizer = Tokenizer.train(["document 0 1 2"], 270)
    prepared = prepare([tmp_path / "downloaded"], tokenizer, tmp_path / "shards")
    assert sum(row["documents"] for row in prepared.table()) == 60


@pytest.mark.slow
def test_the_hub_is_told_who_asks(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    fetch(server, tmp_path)
    assert server.tokens == {"Bearer hf_of_the_user"}


@pytest.mark.slow
def test_only_the_first_files(server: SmallHub, tmp_path: Path) -> None:
    fetch(server, tmp_path, first_files=2)
    assert sorted(here(tmp_path)) == ["sample/10BT/0.parquet", "sample/10BT/1.parquet"]
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)


@pytest.mark.slow
def test_a_broken_connection_is_resumed(server: SmallHub, tmp_path: Path) -> None:
    server.drop_after = [20_000, 0, 5_000]
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)
    ranges = [asked for name, asked in server.requests if name.endswith("0.parquet")]
    assert ranges == [None, "bytes=20000-", "bytes=20000-", "bytes=25000-"]


@pytest.mark.slow
def test_an_answer_that_ends_early_without_a_stated_length_is_resumed(
    server: SmallHub, tmp_path: Path
) -> None:
    server.states_lengths = False
    server.drop_after = [20_000, 5_000]
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)
    ranges = [asked for name, asked in server.requests if name.endswith("0.parquet")]
    assert ranges == [None, "bytes=20000-", "bytes=25000-"]


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(server: SmallHub, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(file: RemoteFile, bytes_here: int) -> None:
        if file.path.endswith("1.parquet") and bytes_here >= 30_000:
            raise Killed

    with pytest.raises(Killed):
        fetch(server, tmp_path, report=kill)
    assert not (tmp_path / "sample/10BT/1.parquet").exists()
    server.requests.clear()
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)
    assert server.requests[0] == ("sample/10BT/1.parquet", "bytes=30000-")


@pytest.mark.slow
def test_a_server_that_ignores_ranges_sends_all_again(server: SmallHub, tmp_path: Path) -> None:
    server.ignores_ranges = True
    server.drop_after = [20_000]
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sample/10BT/1.parquet", "notes/few.jsonl"])
def test_a_damaged_file_never_gets_its_name(server: SmallHub, tmp_path: Path, name: str) -> None:
    inside = str(Path(name).parent)
    server.damage.add(name)
    with pytest.raises(FileError, match=r"has a wrong checksum"):
        fetch(server, tmp_path, inside)
    assert not (tmp_path / name).exists()
    server.damage.clear()
    fetch(server, tmp_path, inside)
    assert (tmp_path / name).read_bytes() == server.files[name]


@pytest.mark.slow
def test_a_full_disk_is_told_and_loses_nothing(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "no_link", lambda _path, flags: os.open("/dev/full", flags))
        with pytest.raises(FileError, match=r"No space left on device\)\. Free some space and run"):
            fetch(server, tmp_path)
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)


@pytest.mark.slow
def test_a_file_damaged_here_is_fetched_again(server: SmallHub, tmp_path: Path) -> None:
    fetch(server, tmp_path)
    path = tmp_path / "sample/10BT/1.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    server.requests.clear()
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)
    assert server.requests == [("sample/10BT/1.parquet", None)]


@pytest.mark.slow
@pytest.mark.parametrize("states_lengths", [True, False])
@pytest.mark.parametrize("size", [19, 49_999, 200_000])
def test_a_login_page_in_between(
    server: SmallHub, tmp_path: Path, states_lengths: bool, size: int
) -> None:
    """The command ends after a few attempts, and the next run repairs what was received."""
    server.drop_after = [20_000]
    server.states_lengths = states_lengths

    def log_out(_file: RemoteFile, bytes_here: int) -> None:
        if bytes_here >= 20_000 and server.instead is None:
            server.instead = b"x" * size

    with pytest.raises(FileError, match=r"0\.parquet"):
        fetch(server, tmp_path, report=log_out)
    assert len(server.requests) <= 10
    assert not (tmp_path / "sample/10BT/0.parquet").exists()
    server.instead = None
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)


@pytest.mark.slow
def test_a_damaged_partial_file_is_fetched_again(server: SmallHub, tmp_path: Path) -> None:
    partial = tmp_path / "sample/10BT/.0.parquet.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 10_000)
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached(server: SmallHub, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(FileError, match=r"cannot reach the hub.*Check the network"):
        fetch(server, tmp_path)


@pytest.mark.slow
def test_a_connection_that_stays_broken(server: SmallHub, tmp_path: Path) -> None:
    server.drop_after = [0] * 50
    with pytest.raises(FileError, match=r"0\.parquet: cannot reach 127\.0\.0\.1"):
        fetch(server, tmp_path)
    server.drop_after.clear()
    fetch(server, tmp_path)
    assert here(tmp_path) == documents(server)


@pytest.mark.slow
def test_names_and_mistakes(server: SmallHub, tmp_path: Path) -> None:
    assert resolve("fineweb-edu-10bt") == ("HuggingFaceFW/fineweb-edu", "sample/10BT")
    assert resolve("huginn") == ("tomg-group-umd/huginn-dataset", "")
    assert resolve("a/b:c/d/") == ("a/b", "c/d")
    with pytest.raises(ConfigError, match="Did you mean fineweb-edu-10bt"):
        resolve("fineweb-edu-10b")
    with pytest.raises(FileError, match="no such dataset on the hub"):
        download("someone/else", tmp_path / "else", endpoint=server.endpoint)
    with pytest.raises(FileError, match="no files with documents"):
        download(f"{REPOSITORY}:other", tmp_path / "other", endpoint=server.endpoint)
    fetch(server, tmp_path / "texts")
    with pytest.raises(FileError, match=r"contains someone/texts:sample/10BT"):
        download(REPOSITORY, tmp_path / "texts", endpoint=server.endpoint)
    with pytest.raises(FileError, match=r"contains revision main \(c0ffee"):
        fetch(server, tmp_path / "texts", revision="v2")
    fetch(server, tmp_path / "texts", revision="main")
    for count in (0, -1):
        with pytest.raises(ConfigError, match=f"first_files: {count} is out of range"):
            fetch(server, tmp_path / "none", first_files=count)
    (tmp_path / "texts" / downloads.RECORD).write_text("{}")
    with pytest.raises(
        FileError, match=r"changed since it was written.*Delete it; files that are complete"
    ):
        fetch(server, tmp_path / "texts")


@pytest.mark.slow
def test_one_kind_of_file_is_fetched_and_no_metadata(server: SmallHub, tmp_path: Path) -> None:
    assert [file.path for file in fetch(server, tmp_path / "a").files] == sorted(documents(server))
    assert [f.path for f in fetch(server, tmp_path / "b", "notes").files] == ["notes/few.jsonl"]


@pytest.mark.slow
def test_no_file_leaves_the_folder(server: SmallHub, tmp_path: Path) -> None:
    """Names come from the server, and later from the record in the folder."""
    folder = tmp_path / "data"
    server.files["../outside.parquet"] = b"planted"
    with pytest.raises(FileError, match=r"'\.\./outside\.parquet' is named as a file of it"):
        download(REPOSITORY, folder, endpoint=server.endpoint)
    assert not (folder / downloads.RECORD).exists()
    file = RemoteFile("../outside.parquet", 7, hashlib.sha256(b"planted").hexdigest())
    dataset = downloads.Dataset(REPOSITORY, "", "main", COMMIT, (file,))
    write_sealed(folder / downloads.RECORD, asdict(dataset))
    with pytest.raises(FileError, match="is named as a file of it"):
        download(REPOSITORY, folder, endpoint=server.endpoint)
    assert not (tmp_path / "outside.parquet").exists()
    assert server.requests == []


@pytest.mark.parametrize(
    "change", [{"files": 3}, {"files": [{"path": 3}]}, {"commit": None}, {"more": 1}]
)
def test_a_record_of_wrong_types(change: dict[str, object], tmp_path: Path) -> None:
    tree = asdict(downloads.Dataset(REPOSITORY, "", "main", COMMIT, ()))
    write_sealed(tmp_path / downloads.RECORD, {**tree, **change})
    with pytest.raises(FileError, match=r"\.download\.json: a value is missing or wrong"):
        download(REPOSITORY, tmp_path)
