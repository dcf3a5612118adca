"""Runs commands in the children of `faults.server`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 120
"""A command that takes longer is taken for one that never ends."""
QUESTION = {"prompt": "alpha", "max_tokens": 4, "seed": 1}


@dataclass(frozen=True)
class Fault:
    """At event number `at` of a kind (read, change, grow), as `faults.c` does it."""

    mode: str = "count"
    kind: str = "change"
    at: int = 0
    error: int = 0
    clock: int = 0


@dataclass
class Ended:
    code: int | None
    counts: dict[str, int]
    out: str
    err: str

    def problems(self, codes: Sequence[int | None] = (0,)) -> list[str]:
        """What is wrong with the exit code and the messages; 2 stands for one line of an error."""
        if self.code is None:
            return [f"did not end in {SECONDS} s"]
        if "Traceback" in self.err or self.code not in codes:
            return [f"exit code {self.code}: {self.err.strip()[-700:]}"]
        lines = self.err.strip().splitlines() or [""]
        if self.code == 2 and not lines[-1].startswith("parcae: "):
            return [f"exit code 2 without a line: {self.err[-300:]}"]
        return []


class Server:
    """The process that runs commands; see `faults.server`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cell = folder / "cell"
        library = folder / "faults.so"
        build = [
            "cc",
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            str(library),
            str(HERE / "faults.c"),
            "-ldl",
        ]
        subprocess.run(build, check=True)
        paths = [ROOT / "src", ROOT / "tests", ROOT / "benchmarks"]
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "PARCAE_NATIVE": "0",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "MPLCONFIGDIR": str(folder / "cache"),
            "COLUMNS": "400",
        }
        environment.pop("PARCAE_DEBUG", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._read()

    def start(self, function: str, *arguments: Any, fault: Fault | None, log: str = "log") -> int:
        for path in self.folder.glob(f"{log}.*"):
            path.unlink()
        request = {"function": function, "arguments": arguments, "folder": str(self.cell)}
        request |= {"log": str(self.folder / log), "fault": fault and asdict(fault)}
        return self._ask({"start": request})["process"]

    def wait(self, process: int, log: str = "log", seconds: float = SECONDS) -> Ended:
        answer = self._ask({"wait": {"process": process, "seconds": seconds}})
        out, err = (self.read(f"{log}.{name}") for name in ("out", "err"))
        return Ended(answer["code"], answer["counts"], out, err)

    def run(self, function: str, *arguments: Any, fault: Fault | None = None) -> Ended:
        return self.wait(self.start(function, *arguments, fault=fault))

    def read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace")
        return ""

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def open_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="parcae-faults-") as name:
        server = Server(Path(name))
        try:
            yield server
        finally:
            server.close()


def is_running(process: int) -> bool:
    """Whether a child of the server has not ended; one that has is a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ask(url: str) -> str:
    """The text that a server answers to a question."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(QUESTION), headers)
        return json.load(connection.getresponse())["choices"][0]["text"]
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error}"
    finally:
        connection.close()
