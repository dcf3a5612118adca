"""Train, or serve, for a long time, and see that memory, descriptors and disk do not grow.

    python benchmarks/soak.py train --minutes 60 --folder out/soak
    python benchmarks/soak.py serve --minutes 60 --folder out/soak    # serves what was trained

Training validates, checkpoints and deletes old checkpoints every few steps, while `parcae eval`
measures the run every few minutes; then it is asked to stop. Serving answers a few clients, of
which some leave early and some send malformed requests; every text is compared with the engine's. A
sample of the process is taken every few seconds and appended to FOLDER/train.jsonl or
FOLDER/serve.jsonl. The same command after an interruption continues the run and the record. At the
end the second quarter of the samples is compared with the last one; exit code 1 means that
something grew, a text was wrong or the process failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine_name import machine_name
from serve_load import Case, Client, Record, cases, load

ROOT = Path(__file__).parents[1]
SECONDS_BETWEEN_SAMPLES = 5.0
SECONDS_BETWEEN_EVALUATIONS = 120.0
PAUSE = 2.0
"""Of a client between two requests, in seconds: the server then takes a quarter of a core."""
CLIENTS = 4
WARM_UP_STEPS = 100
"""Before the first sample: by then old checkpoints are deleted."""
WARM_UP_SECONDS = 20.0
"""Of requests before the first sample."""
MEMORY_GROWTH = 1.02
"""More than this, from the second to the last quarter, is growth."""
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "memory": statistics.median,
    "descriptors": min,
    "threads": min,
    "checkpoints": max,
    "disk": max,
}
"""What is compared of each measurement: descriptors are open for a moment while a checkpoint is
written or a request is answered, so that only their smallest number shows those that stay open."""
KEPT_CHECKPOINTS = 3
MOST_CHECKPOINTS = KEPT_CHECKPOINTS + 2
"""With the best one, and one that is being written or deleted."""
RECIPE = {
    "--budget.steps": "100000000",  # it is stopped by a signal
    "--model.context_length": "256",
    "--data.validation_fraction": "0.02",
    "--run.checkpoint_every": "20",
    "--run.validate_every": "10",
    "--run.validation_rows": "16",
    "--run.telemetry_every": "20",
    "--run.keep_last": str(KEPT_CHECKPOINTS),
}

Sample = dict[str, Any]


def sample(process: int, folder: Path | None) -> Sample:
    """Memory, descriptors and threads of a process, and the bytes of its checkpoints."""
    status = Path(f"/proc/{process}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    taken: Sample = {
        "memory": int(fields["VmRSS"].split()[0]) * 1024,
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(fields["Threads"]),
    }
    if folder is not None:
        sizes = [size(path) for path in (folder / "checkpoints").glob("*")]
        taken["checkpoints"], taken["disk"] = len(sizes), sum(sizes)
        taken["largest checkpoint"] = max(sizes, default=0)
    return taken


def size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # an old checkpoint, deleted meanwhile
            continue
    return total


class Recorder:
    """Appends samples to a file; the file of an interrupted soak is continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.samples: list[Sample] = [json.loads(line) for line in lines]
        self.before = self.samples[-1]["seconds"] if self.samples else 0.0
        self.start = time.monotonic()

    def begin(self) -> None:
        """Count the time from now on: what a process does at its start is no part of the soak."""
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of the whole soak, with those before an interruption."""
        return self.before + time.monotonic() - self.start

    def add(self, taken: Sample) -> None:
        self.samples.append({"seconds": round(self.seconds, 1), **taken})
        with self.path.open("a") as stream:
            stream.write(json.dumps(self.samples[-1]) + "\n")


def judge(samples: list[Sample], connections: int = 0) -> dict[str, Any]:
    """A statistic of the second and of the last quarter, and what has grown between them.

    `connections`: of clients, each of which may have a descriptor open whenever samples are taken.
    """
    quarter = len(samples) // 4
    if quarter == 0:
        return {"samples": len(samples), "problems": ["too short to compare quarters"]}
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    found: dict[str, Any] = {"samples": len(samples), "seconds": samples[-1]["seconds"]}
    problems = []
    for name, statistic in STATISTICS.items():
        if name not in samples[-1]:
            continue
        before, after = (statistic([s[name] for s in part]) for part in (second, last))
        found[name] = {"of": statistic.__name__, "second quarter": before, "last quarter": after}
        limits = {
            "memory": before * MEMORY_GROWTH,
            "descriptors": before + connections,
            "checkpoints": MOST_CHECKPOINTS,
            "disk": MOST_CHECKPOINTS * max(s.get("largest checkpoint", 0) for s in samples),
        }
        if after > limits.get(name, before):
            problems.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    return {**found, "problems": problems}


def watch(
    process: subprocess.Popen[str],
    recorder: Recorder,
    seconds: float,
    folder: Path,
    tick: Callable[[], None],
) -> None:
    """Take samples for some time, or until the process ends; `tick` is called after each."""
    recorder.begin()
    while process.poll() is None and recorder.seconds < seconds:
        try:
            recorder.add(sample(process.pid, folder))
        except (FileNotFoundError, ProcessLookupError, KeyError):  # it has just ended
            break
        tick()
        try:
            process.wait(SECONDS_BETWEEN_SAMPLES)
        except subprocess.TimeoutExpired:
            continue


def train(folder: Path, minutes: float) -> dict[str, Any]:
    run, recorder = folder / "run", Recorder(folder / "train.jsonl")
    if (run / "metrics.jsonl").exists():
        command = ["train", "--resume", str(run)]
    else:
        settings = [word for pair in RECIPE.items() for word in pair]
        command = ["train", str(ROOT / "recipes" / "smoke.toml"), "--out", str(run)]
        command += settings
    evaluations = {"done": 0, "failed": 0}
    next_evaluation = recorder.seconds + SECONDS_BETWEEN_EVALUATIONS

    def evaluate() -> None:
        nonlocal next_evaluation
        if recorder.seconds < next_evaluation or not list((run / "checkpoints").glob("step-*")):
            return
        next_evaluation = recorder.seconds + SECONDS_BETWEEN_EVALUATIONS
        out = ["--out", str(folder / "evaluation"), "--overwrite", "--loops", "1,4", "--limit", "8"]
        ended = parcae("eval", str(run), *out).wait()
        evaluations["done" if ended == 0 else "failed"] += 1

    process = parcae(*command)
    first = count_steps(run)
    try:
        while process.poll() is None and count_steps(run) < first + WARM_UP_STEPS:
            time.sleep(1)
        watch(process, recorder, 60 * minutes, run, evaluate)
        ended_early = process.poll() is not None
    finally:
        process.terminate()
        code = process.wait(120)
    found = judge(recorder.samples)
    if code:
        found["problems"].append(f"exit code {code}")
    if evaluations["failed"]:
        found["problems"].append(f"{evaluations['failed']} evaluations failed")
    if ended_early:
        found["problems"].append("training ended early")
    return {**found, "steps": count_steps(run), "evaluations": evaluations}


def count_steps(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_text().count('"kind": "train"') if log.exists() else 0


def parcae(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    options.setdefault("stdout", subprocess.DEVNULL)
    command = [sys.executable, "-m", "parcae", *arguments]
    return subprocess.Popen(command, text=True, **options)


def serve(folder: Path, minutes: float) -> dict[str, Any]:
    run, recorder = folder / "run", Recorder(folder / "serve.jsonl")
    requests = cases(run, 32, random.Random(0))
    process = parcae("serve", f"model={run}", "--port", "0", stdout=subprocess.PIPE)
    assert process.stdout is not None
    url = process.stdout.readline().split()[2]
    before = recorder.samples[-1] if recorder.samples else counts(Record())
    record = Record(texts=before["texts"], wrong=before["wrong texts"])
    record.answers.update(before["answers"])
    try:
        asyncio.run(load(url, requests, CLIENTS, WARM_UP_SECONDS, mixed=False))
        recorder.begin()
        until = time.monotonic() + 60 * minutes - recorder.before
        asyncio.run(_load(url, requests, record, until, process, recorder))
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    found = judge(recorder.samples, CLIENTS)
    if code or record.errors or record.wrong:
        problem = f"exit code {code}, {record.errors} errors, {record.wrong} wrong texts"
        found["problems"].append(problem)
    return {**found, **counts(record)}


def counts(record: Record) -> dict[str, Any]:
    return {"texts": record.texts, "wrong texts": record.wrong, "answers": dict(record.answers)}


async def _load(
    url: str,
    requests: list[Case],
    record: Record,
    until: float,
    process: subprocess.Popen[str],
    recorder: Recorder,
) -> None:
    clients = [_client(url, requests, record, until, n) for n in range(CLIENTS)]
    await asyncio.gather(_samples(process, recorder, record, until), *clients)


async def _client(url: str, requests: list[Case], record: Record, until: float, seed: int) -> None:
    rng = random.Random(seed)
    client = Client(url, record, rng)
    while time.monotonic() < until:
        await client.run([rng.choice(requests)], time.monotonic() + 1e-3, mixed=True)
        await asyncio.sleep(rng.uniform(0, 2 * PAUSE))


async def _samples(
    process: subprocess.Popen[str], recorder: Recorder, record: Record, until: float
) -> None:
    while time.monotonic() < until:
        recorder.add({**sample(process.pid, None), **counts(record)})
        await asyncio.sleep(SECONDS_BETWEEN_SAMPLES)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("train", "serve"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--folder", type=Path, default=Path("out/soak"))
    parser.add_argument("--record", type=Path, help="JSON file of results, which are added to it")
    arguments = parser.parse_args()
    result = (train if arguments.what == "train" else serve)(arguments.folder, arguments.minutes)
    print(json.dumps(result, indent=2))
    if arguments.record is not None:
        path = arguments.record
        tree = json.loads(path.read_text()) if path.exists() else {}
        tree |= {"machine": machine_name(), arguments.what: result}
        path.write_text(json.dumps(tree, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
