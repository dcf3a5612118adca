"""The process: signals, restarts, the command and the files that deploy it."""

from __future__ import annotations

import configparser
import contextlib
import json
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from oracles import text_model, tokenizer
from parcae.cli import main, parser
from parcae.config import ConfigError
from parcae.model.store import save
from parcae.serving import models
from parcae.serving import server as server_module
from parcae.serving.app import create_app
from parcae.serving.metrics import Metrics
from parcae.serving.server import Connection, EngineFailed, Server, serve
from parcae.serving.settings import ServerSettings
from serving_fixtures import checkpoint, make_app

ROOT = Path(__file__).parents[2]
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
"""All of a request but its last line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(text_model(), folder)
    tokenizer().save(folder / "tokenizer.json")
    return folder


def start(folder: Path, *options: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-m", "parcae", "serve", f"one={folder}", f"two={folder}", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("Serving on http://"), process.communicate()
    return process, line.split()[2]


class Supervisor(threading.Thread):
    """Restarts a server that ends, as `Restart=always` of the systemd unit does."""

    def __init__(self, *arguments) -> None:
        super().__init__(daemon=True)
        self.arguments, self.starts, self.is_stopped = arguments, 0, False
        self.process, self.url = start(*arguments)
        super().start()

    def run(self) -> None:
        while True:
            self.process.wait()
            if self.is_stopped:
                return
            port = str(httpx.URL(self.url).port)
            self.process, self.url = start(*self.arguments[:-1], port)
            self.starts += 1

    def stop(self) -> None:
        self.is_stopped = True
        self.process.kill()
        self.join(60)


def text(url: str) -> str:
    body = {"prompt": "def ", "max_tokens": 4, "seed": 1, "model": "two"}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    return answer.json()["choices"][0]["text"]


def text_once_served(url: str) -> str:
    """Asks until the server is back, as clients do."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return text(url)
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_server_is_restarted_serves_again_and_drains(folder):
    supervisor = Supervisor(folder, "--port", "0")
    try:
        url, killed = supervisor.url, supervisor.process
        expected = text(url)
        body = {"prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            killed.kill()
            with contextlib.suppress(httpx.TransportError):  # it ends, whatever it has received
                list(lines)
        assert killed.wait(60) == -signal.SIGKILL
        assert text_once_served(url) == expected
        assert supervisor.starts == 1

        supervisor.is_stopped = True
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            supervisor.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]", "what has begun is finished"
        assert supervisor.process.wait(60) == 0
        assert supervisor.process.stderr.read() == ""
    finally:
        supervisor.stop()


class Stopping:
    """A server that writes a long text slowly; `stop` is a signal."""

    def __init__(self, monkeypatch, **settings) -> None:
        monkeypatch.setattr(signal, "signal", lambda *arguments: None)
        self.app = make_app(**settings)
        model = self.app.state.models["tiny"]
        self.scheduler, step = model.scheduler, model.engine.step
        model.engine.step = lambda: (time.sleep(0.05), step())[1]
        urls: queue.Queue[str] = queue.Queue()
        config = uvicorn.Config(self.app, port=0, http=Connection, log_config=None)
        self.server = Server(config, self.app, urls.put)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self.url = urls.get(timeout=60)

    def stop(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def connect(self) -> socket.socket:
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port), 60)

    def write(self) -> Iterator[str]:
        """The events of a text, after the first."""
        body = {"prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True}
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            self.stop()
            yield from lines


def test_a_server_whose_engine_thread_has_died_stops(monkeypatch):
    """It could only answer 503; ended, it is started again by its supervisor."""

    def broken(*_):
        raise OSError

    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(Metrics, "count_step", broken)
    urls: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(serve, named={"tiny": checkpoint()}, port=0, on_start=urls.put)
        body = {"prompt": "a", "max_tokens": 5}
        url = f"{urls.get(timeout=60)}/v1/completions"
        assert httpx.post(url, json=body, timeout=60).status_code >= 500
        with pytest.raises(EngineFailed, match="Start the server again"):
            server.result(60)


@pytest.mark.slow
def test_a_text_that_takes_too_long_to_finish_ends_with_an_error(monkeypatch, caplog):
    stopping = Stopping(monkeypatch, drain_seconds=0.5)
    *_, last = stopping.write()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    stopping.thread.join(60)
    assert stopping.scheduler.state == "closed"
    assert not caplog.records, "nothing is cancelled, and no trace is logged"


@pytest.mark.slow
def test_the_number_of_connections_is_limited(monkeypatch):
    monkeypatch.setattr(Connection, "limit", 2)
    stopping = Stopping(monkeypatch)
    with stopping.connect(), stopping.connect() as second:
        second.sendall(HEAD + b"\r\n")
        assert b" 200 " in second.recv(4096), "both have been accepted"
        refused = httpx.get(f"{stopping.url}/health", timeout=60)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert refused.json()["error"]["code"] == "busy"
    stopping.stop()
    stopping.thread.join(60)


@pytest.mark.slow
def test_connections_without_a_request_are_closed(monkeypatch):
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.5)
    stopping = Stopping(monkeypatch)
    # One that takes longer than its head may is answered.
    body = {"prompt": "a", "max_tokens": 30, "temperature": 0}
    start = time.monotonic()
    assert httpx.post(f"{stopping.url}/v1/completions", json=body, timeout=60).is_success
    assert time.monotonic() - start > 0.5
    for sent in (b"", HEAD, HEAD + b"\r\n" + HEAD):
        with stopping.connect() as connection:
            connection.sendall(sent)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
            assert answer.count(b" 200 ") == (len(sent) > len(HEAD))
    stopping.stop()
    stopping.thread.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("reads", [True, False])
def test_the_second_signal_ends_at_once(monkeypatch, reads):
    """Also where a client does not read what it is sent, the error among it."""
    monkeypatch.setattr(server_module, "SEND_SECONDS", 0.2)
    stopping = Stopping(monkeypatch, drain_seconds=1000)
    if not reads:
        monkeypatch.setattr(server_module, "end", lambda app: None)
    lines = stopping.write()
    next(lines)
    stopping.stop()
    if reads:
        *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    else:
        with pytest.raises(httpx.TransportError):
            list(lines)
    stopping.thread.join(60)
    assert not stopping.thread.is_alive()


def test_the_command_refuses_what_cannot_work(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARCAE_API_KEY", raising=False)
    (tmp_path / "keys").write_text("\n")
    for arguments, message in (
        (["demo"], "`make demo` trains it"),
        (["nowhere"], "nowhere"),
        ([str(folder), "--host", "0.0.0.0"], "Give one (--api-key-file"),  # noqa: S104
        ([str(folder), str(folder)], "two have the same name"),
        ([str(folder), "--max-batch-size", "0"], "max_batch_size"),
        ([str(folder), "--max-choices", "500"], "do not fit in a queue"),
        ([str(folder), "--api-key-file", "keys"], "no key"),
    ):
        assert main(["serve", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_an_address_that_cannot_be_used_is_named_before_models_are_opened(tmp_path, capsys):
    missing = str(tmp_path / "missing")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        for options, message in (
            (["--port", "99999"], "port: 99999 is out of range"),
            (["--port", str(taken)], f"port: {taken} of 127.0.0.1 is not available"),
            (["--port", "0"], f"{missing}: no such folder"),
        ):
            assert main(["serve", missing, *options]) == 2
            assert message in capsys.readouterr().err


def test_every_setting_is_an_option():
    arguments = parser().parse_args(["serve", "demo"])
    for name, value in vars(ServerSettings()).items():
        assert getattr(arguments, name) == value


def test_formats_of_weights_and_cache_reach_the_engine(monkeypatch):
    options = {}
    monkeypatch.setattr(server_module, "serve", lambda *_, **given: options.update(given))
    words = ["--weight-dtype", "int8", "--cache-dtype", "bfloat16", "--cache", "last:2"]
    assert main(["serve", "demo", *words]) == 0
    formats = (options["weight_dtype"], options["cache_dtype"], options["cache"])
    assert formats == ("int8", "bfloat16", "last:2")


def test_names_of_models(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "out/demo/run")
    served = models.open_models(["demo", f"b={folder}", folder], ServerSettings(cache_gib=0.1))
    try:
        assert list(served) == ["demo", "b", folder.name]
        assert served["b"].card()["parcae"]["looped"]
    finally:
        for model in served.values():
            model.scheduler.close()


def test_models_share_the_memory_for_caches(monkeypatch, folder):
    monkeypatch.setattr(models, "available_memory", lambda device: 1_200_000)
    for names, share in (("a", 600_000), ("abc", 200_000)):
        served = models.open_models([f"{name}={folder}" for name in names], ServerSettings())
        assert {model.engine.cache.max_bytes for model in served.values()} == {share}
        for model in served.values():
            model.scheduler.close()


def test_models_are_given_by_path_or_by_name():
    with pytest.raises(ConfigError, match="named: models are given by path too"):
        create_app("a", named={"b": "b"})


def test_the_systemd_unit_starts_a_valid_command():
    path = ROOT / "deploy/parcae.service"
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string(path.read_text())
    service = unit["Service"]
    _, *arguments = shlex.split(service["ExecStart"])
    parsed = parser().parse_args(arguments)
    assert parsed.api_key_file is not None
    assert service["Restart"] == "always"
    assert float(service["TimeoutStopSec"]) > ServerSettings().drain_seconds
    if tool := shutil.which("systemd-analyze"):
        answer = subprocess.run([tool, "verify", path], capture_output=True, text=True)
        problems = [line for line in answer.stderr.splitlines() if "not executable" not in line]
        assert not [line for line in problems if "parcae.service:" in line]


def test_the_containerfile_copies_what_exists_and_starts_a_valid_command():
    lines = (ROOT / "deploy/Containerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert steps[0][0] == "FROM"
    for name, rest in steps:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    values = dict(steps)
    entry, command = json.loads(values["ENTRYPOINT"]), json.loads(values["CMD"])
    assert parser().parse_args([*entry[1:], *command]).host == "0.0.0.0"  # noqa: S104
    assert any('".[serve]"' in rest for _, rest in steps)


def test_a_port_in_use_is_one_line(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"parcae: port: {port} of 127.0.0.1 is not available")
    assert error.count("\n") == 1
    assert main(["serve", str(folder), "--port", "99999"]) == 2
