"""Load a server with many clients and compare with one request at a time.

    python benchmarks/serve_load.py out/demo/run --clients 64 --minutes 10
    python benchmarks/serve_load.py parcae-10m                        # untrained
    python benchmarks/serve_load.py parcae-10m --table --clients 1 4 16 64

Starts `parcae serve`. First one client sends requests one after the other, then all clients at
once; some disconnect after the first token, some send malformed requests. Requests differ in
prompt, length, depth, exit rule and seed; every text that is returned is compared with the
engine's. Prints tokens per second of both, the server's CPU time per token, the time to the first
token and between tokens, and the memory of the server after every minute. The exit code is 1 if a
text differs from the engine's or a well-formed request is not answered.

`--table` prints a row of speed and latency for every number of clients instead; all of them are
well behaved.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import parcae
from machine_name import machine_name
from parcae.data.tokenizer import Tokenizer
from parcae.infer.engine import Engine
from parcae.runs import open_checkpoint

MALFORMED = (
    b"{",
    b'{"prompt": 3}',
    b'{"prompt": "a", "num_loops": 100000}',
    b'{"promt": "a"}',
    b"[]",
)
EXPECTED = ("ok", "left", "refused")
"""Kinds of answers that are not errors."""


@dataclass
class Case:
    """A request and the text that the engine gives for it."""

    body: dict[str, Any]
    text: str


@dataclass
class Record:
    """What one phase saw."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the server."""
    tokens: int = 0
    texts: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of streams."""
    between: list[float] = field(default_factory=list)
    """Seconds from a token to the next, the mean of every stream."""
    answers: Counter[str] = field(default_factory=Counter)
    wrong: int = 0

    def add(self, other: Record) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def rate_per_cpu(self) -> float:
        """Tokens per second of the server's CPU time."""
        return self.tokens / self.cpu_seconds

    @property
    def errors(self) -> int:
        """Well-formed requests that were not answered, and malformed ones that were not refused."""
        return sum(count for kind, count in self.answers.items() if kind not in EXPECTED)

    def milliseconds(self) -> list[float]:
        """p50 and p99 of the time to the first token, then of the time between tokens."""
        times = (self.first or [np.nan], self.between or [np.nan])
        return [1000 * float(x) for part in times for x in np.percentile(part, [50, 99])]


def cases(checkpoint: Path, count: int, rng: random.Random) -> list[Case]:
    model, tokenizer, _ = open_checkpoint(checkpoint)
    engine = Engine(model, tokenizer)
    nominal = model.config.loop.nominal_loops
    words = ("import", "os", "def", "class", "return", "self", "None", "for", "in", "(", ")", ":")
    made: list[dict[str, Any]] = []
    for seed in range(count):
        prompt = " ".join(rng.choice(words) for _ in range(rng.randint(1, 20)))
        loops = rng.choice([1, 2, nominal, nominal, 2 * nominal])
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(16, 128), "seed": seed}
        body |= {"temperature": rng.choice([0, 0.8]), "num_loops": loops}
        if seed % 4 == 1:
            body["exit"] = "state:0.1"
        made.append(body)
    assert tokenizer is not None
    eos = tokenizer.backend_tokenizer.token_to_id("<|eos|>")
    stops = {tokenizer.bos, *(() if eos is None else (eos,))}
    names = {"max_tokens": "max_new_tokens", "num_loops": "loops"}
    requests = [
        engine.request(
            stop_tokens=stops, **{names.get(key, key): value for key, value in body.items()}
        )
        for body in made
    ]
    texts = [completion.text or "" for completion in engine.complete(requests)]
    return [Case(body, text) for body, text in zip(made, texts, strict=True)]


class Client:
    """Sends requests by HTTP/1.1, with as little work as possible beside the server."""

    def __init__(self, url: str, record: Record, rng: random.Random) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        self.record, self.rng = record, rng

    async def run(self, cases: list[Case], until: float, mixed: bool) -> None:
        """`mixed`: some requests are malformed and some streams are left."""
        while time.monotonic() < until:
            case, kind = self.rng.choice(cases), self.rng.random() if mixed else 1.0
            if kind < 0.05:
                await self._malformed()
            else:
                await self._request(case, stream=self.rng.random() < 0.5, leave=kind < 0.1)

    async def _malformed(self) -> None:
        reader, writer = await self._send(self.rng.choice(MALFORMED))
        status = await _status(reader)
        self.record.answers["refused" if status == 400 else f"malformed: {status}"] += 1
        writer.close()

    async def _request(self, case: Case, stream: bool, leave: bool) -> None:
        options = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
        start = time.monotonic()
        reader, writer = await self._send(json.dumps({**case.body, **options}).encode())
        status = await _status(reader)
        if status != 200:
            self.record.answers[str(status)] += 1
            if status == 429:
                await asyncio.sleep(1)
        elif leave and stream:
            await reader.readuntil(b"data: ")
            self.record.answers["left"] += 1
        else:
            text, tokens = await self._read(reader, stream, start)
            self.record.answers["ok"] += 1
            self.record.texts += 1
            self.record.tokens += tokens
            self.record.wrong += text != case.text
        writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, stream: bool, start: float
    ) -> tuple[str, int]:
        if not stream:
            tree = json.loads((await reader.read()).decode())
            return tree["choices"][0]["text"], tree["usage"]["completion_tokens"]
        text, tokens, first, last = "", 0, 0.0, 0.0
        while True:
            line = await reader.readline()
            if not line:
                self.record.answers["cut off"] += 1
                return text, tokens
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                self.record.first.append(first - start)
                if tokens > 1:
                    self.record.between.append((last - first) / (tokens - 1))
                return text, tokens
            tree = json.loads(line[6:])
            if "error" in tree:
                self.record.answers[f"stream: {tree['error']['code']}"] += 1
                return text, tokens
            if tree["choices"]:
                last = time.monotonic()
                first = first or last
            text += "".join(choice["text"] for choice in tree["choices"])
            tokens += (tree["usage"] or {}).get("completion_tokens", 0)

    async def _send(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer


async def _status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1])


async def load(
    url: str,
    cases: list[Case],
    clients: int,
    seconds: float,
    mixed: bool,
    on_minute: Callable[[Record], None] | None = None,
) -> Record:
    """`on_minute` is called with what was seen so far."""
    record, start = Record(), time.monotonic()
    workers = [Client(url, record, random.Random(n)) for n in range(clients)]
    watch = None if on_minute is None else asyncio.create_task(_every_minute(record, on_minute))
    await asyncio.gather(*(w.run(cases, start + seconds, mixed) for w in workers))
    if watch is not None:
        watch.cancel()
    record.seconds = time.monotonic() - start
    return record


async def _every_minute(record: Record, report: Callable[[Record], None]) -> None:
    while True:
        await asyncio.sleep(60)
        report(record)


def untrained(preset: str, folder: Path) -> Path:
    """A folder with a model of random weights and a small tokenizer."""
    files = sorted(Path(random.__file__).parent.glob("*.py"))
    encoder = Tokenizer.train((file.read_text(encoding="utf-8") for file in files), 2048)
    config = replace(parcae.preset(preset), vocab_size=encoder.vocab_size, context_length=256)
    parcae.save(parcae.create(config), folder)
    encoder.save(folder / "tokenizer.json")
    return folder


class Server:
    """`parcae serve` as a process, and the requests to load it with."""

    def __init__(self, checkpoint: Path, cases: list[Case], options: list[str]) -> None:
        self.cases = cases
        command = [sys.executable, "-m", "parcae", "serve", f"model={checkpoint}", "--port", "0"]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[2]

    def load(
        self,
        clients: int,
        seconds: float,
        mixed: bool = False,
        on_minute: Callable[[Record], None] | None = None,
    ) -> Record:
        before = self._cpu_seconds()
        record = asyncio.run(load(self.url, self.cases, clients, seconds, mixed, on_minute))
        record.cpu_seconds = self._cpu_seconds() - before
        return record

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory(self) -> float:
        """Resident memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def print_record(name: str, record: Record) -> None:
    answers = ", ".join(f"{count} {answer}" for answer, count in sorted(record.answers.items()))
    first50, first99, between50, between99 = record.milliseconds()
    print(
        f"{name}: {record.rate:,.1f} tokens/s, {record.rate_per_cpu:,.0f} per CPU second; {answers}"
    )
    print(f"  {record.wrong} of {record.texts} texts differ from the engine's")
    print(
        f"  first token: p50 {first50:.0f} ms, p99 {first99:.0f} ms, "
        f"max {1000 * max(record.first, default=0):.0f} ms; "
        f"between tokens: p50 {between50:.1f} ms, p99 {between99:.1f} ms"
    )


def compare(server: Server, clients: int, minutes: float, alone_seconds: float) -> Record:
    """One client, then all, some of which misbehave. Returns what all of them saw."""
    alone = server.load(1, alone_seconds)
    print_record("one at a time", alone)
    print(f"load of the machine {os.getloadavg()[0]:.1f}; memory {server.memory:.0f} MB")
    tokens = [0]

    def report(record: Record) -> None:
        rate = (record.tokens - tokens[-1]) / 60
        tokens.append(record.tokens)
        print(
            f"  minute {len(tokens) - 1}: {rate:,.0f} tokens/s, {server.memory:.0f} MB, "
            f"load of the machine {os.getloadavg()[0]:.1f}",
            flush=True,
        )

    total = server.load(clients, 60 * minutes, mixed=True, on_minute=report)
    print(f"  at the end: {server.memory:.0f} MB")
    print_record(f"{clients} clients", total)
    per_cpu = total.rate_per_cpu / alone.rate_per_cpu
    print(f"throughput x {total.rate / alone.rate:.2f}, per CPU second x {per_cpu:.2f}")
    total.add(alone)
    return total


def print_table(server: Server, clients: list[int], seconds: float) -> Record:
    """A row for each number of clients. Returns what all of them saw."""
    print("| clients | tokens/s | first token p50, ms | p99 | between tokens p50, ms | p99 |")
    print("|---:|---:|---:|---:|---:|---:|")
    total = Record()
    for count in clients:
        record = server.load(count, seconds)
        times = " | ".join(f"{value:,.1f}" for value in record.milliseconds())
        print(f"| {count} | {record.rate:,.0f} | {times} |", flush=True)
        total.add(record)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", help="a run, a model folder or a preset")
    parser.add_argument("--clients", type=int, nargs="+", default=[64])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--requests", type=int, default=48, help="different requests")
    parser.add_argument("--seconds", type=float, default=30, help="of one client, or of a row")
    parser.add_argument("--table", action="store_true", help="a row for each number of clients")
    parser.add_argument("--options", default="", help="more options of parcae serve, in one text")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.checkpoint)
        if not path.exists():
            path = untrained(arguments.checkpoint, Path(folder) / "model")
        requests = cases(path, arguments.requests, random.Random(0))
        server = Server(path, requests, arguments.options.split())
        try:
            cores = len(os.sched_getaffinity(0))
            load_average = os.getloadavg()[0]
            print(f"{cores} cores of {machine_name()}; load average {load_average:.1f}")
            server.load(max(arguments.clients), 10)  # chooses kernels, allocates
            if arguments.table:
                record = print_table(server, arguments.clients, arguments.seconds)
            else:
                [clients] = arguments.clients
                record = compare(server, clients, arguments.minutes, arguments.seconds)
        finally:
            server.stop()
    print(
        f"{record.errors} errors, {record.wrong} of {record.texts} texts differ from the engine's"
    )
    return 1 if record.errors or record.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
