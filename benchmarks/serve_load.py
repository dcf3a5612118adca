"""Load a server with many clients and compare with one request at a time.

    python benchmarks/serve_load.py out/demo/run --clients 64 --minutes 10
    python benchmarks/serve_load.py parcae-30m --tokenizer out/demo/run    # untrained

Starts `parcae serve`. First one client sends requests one after the other, then all clients at
once; some disconnect after the first token, some send malformed requests. Requests differ in
prompt, length, depth, exit rule and seed; every text that is returned is compared with the
engine's. Prints tokens per second of both, the server's CPU time per token, the time to the first
token, and the memory of the server after every minute.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import parcae
from parcae.data.tokenizer import Tokenizer
from parcae.infer.engine import Engine
from parcae.runs import find_checkpoint, open_checkpoint
from parcae.runs.loading import find_tokenizer

MALFORMED = (
    b"{",
    b'{"prompt": 3}',
    b'{"prompt": "a", "num_loops": 100000}',
    b'{"promt": "a"}',
    b"[]",
)


@dataclass
class Case:
    """A request and the text that the engine gives for it."""

    body: dict[str, Any]
    text: str


@dataclass
class Record:
    """What one phase saw."""

    tokens: int = 0
    texts: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of streams."""
    answers: Counter[str] = field(default_factory=Counter)
    wrong: int = 0

    def add(self, other: Record) -> None:
        self.tokens += other.tokens
        self.texts += other.texts
        self.first += other.first
        self.answers += other.answers
        self.wrong += other.wrong


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
        text, tokens, first = "", 0, True
        while True:
            line = await reader.readline()
            if not line.startswith(b"data: "):
                continue
            if first:
                self.record.first.append(time.monotonic() - start)
                first = False
            if line.startswith(b"data: [DONE]"):
                return text, tokens
            tree = json.loads(line[6:])
            if "error" in tree:
                self.record.answers[f"stream: {tree['error']['code']}"] += 1
                return text, tokens
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
    url: str, cases: list[Case], clients: int, seconds: float, mixed: bool
) -> tuple[Record, float]:
    """Run clients for some time; returns what they saw and the seconds."""
    record, start = Record(), time.monotonic()
    workers = [Client(url, record, random.Random(n)) for n in range(clients)]
    await asyncio.gather(*(w.run(cases, start + seconds, mixed) for w in workers))
    return record, time.monotonic() - start


def untrained(preset: str, tokenizer: Path, folder: Path) -> Path:
    """A folder with a model of random weights and the vocabulary of a tokenizer."""
    encoder = Tokenizer.load(find_tokenizer(find_checkpoint(tokenizer)))
    config = replace(parcae.preset(preset), vocab_size=encoder.vocab_size, context_length=256)
    parcae.save(parcae.create(config), folder)
    encoder.save(folder / "tokenizer.json")
    return folder


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: subprocess.Popen[str]) -> float:
    """Resident memory of a process in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def report(name: str, record: Record, seconds: float, cpu: float) -> tuple[float, float]:
    """Print and return tokens per second, and per second of the server's CPU time."""
    rate, per_cpu = record.tokens / seconds, record.tokens / cpu
    answers = ", ".join(f"{count} {answer}" for answer, count in sorted(record.answers.items()))
    print(f"{name}: {rate:,.1f} tokens/s, {per_cpu:,.0f} per CPU second; {answers}")
    print(f"  {record.wrong} of {record.texts} texts differ from the engine's")
    if record.first:
        p50, p99 = np.percentile(record.first, [50, 99])
        print(f"  first token: p50 {p50:.3f} s, p99 {p99:.3f} s, max {max(record.first):.3f} s")
    return rate, per_cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", help="a run, a model folder or a preset")
    parser.add_argument("--tokenizer", type=Path, help="a run with a tokenizer, for a preset")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--requests", type=int, default=48, help="different requests")
    parser.add_argument("--alone-seconds", type=float, default=30)
    parser.add_argument("--options", default="", help="more options of parcae serve, in one text")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.checkpoint)
        if arguments.tokenizer is not None:
            path = untrained(arguments.checkpoint, arguments.tokenizer, Path(folder) / "model")
        requests = cases(path, arguments.requests, random.Random(0))
        command = [sys.executable, "-m", "parcae", "serve", f"model={path}", "--port", "0"]
        command += arguments.options.split()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            compare(process, requests, arguments)
        finally:
            process.terminate()
            process.wait(60)
    return 0


def compare(
    process: subprocess.Popen[str], requests: list[Case], arguments: argparse.Namespace
) -> None:
    assert process.stdout is not None
    url = process.stdout.readline().split()[2]
    asyncio.run(load(url, requests, 4, 10, mixed=False))  # chooses kernels, allocates
    before = cpu_seconds(process)
    record, seconds = asyncio.run(load(url, requests, 1, arguments.alone_seconds, mixed=False))
    alone = report("one at a time", record, seconds, cpu_seconds(process) - before)
    print(f"load of the machine {os.getloadavg()[0]:.1f}; memory {memory(process):.0f} MB")
    total, seconds, before = Record(), 0.0, cpu_seconds(process)
    rounds = max(1, round(arguments.minutes))
    for number in range(1, rounds + 1):
        part = arguments.minutes * 60 / rounds
        record, elapsed = asyncio.run(load(url, requests, arguments.clients, part, mixed=True))
        total.add(record)
        seconds += elapsed
        print(
            f"  part {number}: {record.tokens / elapsed:,.0f} tokens/s, {memory(process):.0f} MB",
            flush=True,
        )
    together = report(f"{arguments.clients} clients", total, seconds, cpu_seconds(process) - before)
    print(f"load of the machine {os.getloadavg()[0]:.1f}")
    print(
        f"throughput x {together[0] / alone[0]:.2f}, per CPU second x {together[1] / alone[1]:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
