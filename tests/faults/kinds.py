"""The kinds of faults: each function tries one on a command, and returns what was seen.

In every try the command runs with the fault. It must have ended by the kill, with one line of an
error, or with its usual result, and no file may be half written under its final name. Then the same
command runs again without a fault, and must leave what an undisturbed one leaves, bit for bit.
`only` repeats one event.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.client import ROOT, SECONDS, Fault, ask, is_running
from faults.commands import Command
from faults.outcome import contents, differences, leftovers
from faults.trial import Trial, Tried

REFUSALS = ("is using it", "exists", "in use")
"""What the second of two processes may say."""


def killed(trial: Trial, only: int | None = None) -> Tried:
    """Killed at an event, in every other try once more while it continues."""
    tried = Tried()
    kind = "read" if trial.command.serves else "change"
    for event in [only] if only else trial.events(kind):
        trial.reset()
        ended = trial.run(fault=Fault("kill", kind, event))
        problems = ended.problems((-signal.SIGKILL, 0))
        problems += trial.half_written()
        if event % 2 and not trial.command.serves:
            second = random.Random(event).randint(1, max(1, trial.counts[kind] - event))
            ended = trial.run(again=True, fault=Fault("kill", kind, second))
            problems += ended.problems((-signal.SIGKILL, 0, 2)) + trial.half_written()
        seen = "killed, then the same result"
        tried.add(f"event {event}", seen, problems or trial.continues())
    return tried


def _failing(mode: str, kind: str, error: int) -> Callable[..., Tried]:
    def fail(trial: Trial, only: int | None = None) -> Tried:
        tried = Tried()
        for event in [only] if only else trial.events(kind) or [1]:
            trial.reset()
            ended = trial.run(fault=Fault(mode, kind, event, error))
            problems = ended.problems(_codes(trial.command)) + trial.half_written()
            if ended.code == 0:
                problems += trial.is_as_expected(ended)
                tried.add(f"event {event}", "the same result", problems)
                continue
            seen = "one line, then the same result"
            tried.add(f"event {event}", seen, problems or trial.continues())
        return tried

    return fail


def _codes(command: Command) -> tuple[int, ...]:
    """Exit codes of a command that may be refused; 1 is that of runs which failed."""
    return (0, 1, 2) if command.name in ("sweep", "reproduce") else (0, 2)


def short_writes(trial: Trial, only: int | None = None) -> Tried:
    """Every write takes half of the data, or a few bytes."""
    tried = Tried()
    for size in trial.some((7, 0, 1000)):
        trial.reset()
        ended = trial.run(fault=Fault("short", "change", size))
        problems = ended.problems() + trial.is_as_expected(ended)
        tried.add(f"{size} bytes", "the same result", problems)
    return tried


def read_only(trial: Trial, only: int | None = None) -> Tried:
    tried = Tried()
    trial.reset()
    ended = trial.run(fault=Fault("fail from", "change", 1, errno.EROFS))
    if trial.command.serves:
        problems = ended.problems() + trial.is_as_expected(ended)
        tried.add("read-only", "the same result", problems)
        return tried
    problems = ended.problems((2,))
    if (trial.cell / "out").exists():
        problems.append("something was written")
    tried.add("read-only", "one line, then the same result", problems or trial.continues())
    return tried


def clock_back(trial: Trial, only: int | None = None) -> Tried:
    """Every look at the clock sets it back by a second, an hour, a year."""
    tried = Tried()
    for seconds in trial.some((3600, 1, 365 * 24 * 3600)):
        trial.reset()
        ended = trial.run(fault=Fault(clock=seconds))
        problems = ended.problems() + trial.is_as_expected(ended)
        tried.add(f"{seconds} s", "the same result", problems)
    return tried


def two_processes(trial: Trial, only: int | None = None) -> Tried:
    """The same command twice, the second a little later."""
    tried = Tried()
    server = trial.server
    for number in trial.some(range(20)):
        trial.reset()
        arguments = trial.command.arguments
        if trial.command.serves:
            arguments = (*arguments[:-1], str(free_port()))
        processes = {}
        for name in ("first", "second"):
            processes[name] = server.start("run", arguments, fault=None, log=name)
            time.sleep(0.02 * number)
        if trial.command.serves:
            tried.add(f"{number}", *_two_servers(trial, processes))
            continue
        ended = {name: server.wait(process, name) for name, process in processes.items()}
        problems = [p for e in ended.values() for p in e.problems((0, 2))]
        refused = [e for e in ended.values() if e.code == 2]
        if len(refused) == 2 or not all(any(x in e.err for x in REFUSALS) for e in refused):
            problems.append(" | ".join(e.err[-300:] for e in refused))
        problems += trial.is_as_expected(ended["first"])
        seen = "one did it, one was refused in one line" if refused else "both, the same result"
        tried.add(f"{number}", seen, problems)
    return tried


def _two_servers(trial: Trial, processes: dict[str, int]) -> tuple[str, list[str]]:
    """One of them gets the port and answers; the other is refused in one line."""
    server, end = trial.server, time.monotonic() + SECONDS
    while all(map(is_running, processes.values())) and time.monotonic() < end:
        time.sleep(0.01)
    alive = [name for name, process in processes.items() if is_running(process)]
    text = ""
    if alive:
        while "Serving on " not in (line := server.read(f"{alive[0]}.out")):
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        text = ask(line.split()[2])
        os.kill(processes[alive[0]], signal.SIGTERM)
    ended = {name: server.wait(process, name) for name, process in processes.items()}
    problems = [] if len(alive) == 1 else [f"{len(alive)} servers run"]
    for name, result in ended.items():
        problems += result.problems((0,) if name in alive else (2,))
    problems += [] if text == trial.answer else [f"answer {text!r}"]
    return "one serves, one was refused in one line", problems


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def nan_gradients(trial: Trial, only: int | None = None) -> Tried:
    """Gradients that are not numbers, in one step, or from a step on."""
    tried = Tried()
    runs = "out/run" if trial.command.name == "train" else "out/*/runs/*"
    for step in trial.some((1, 0, 4)):
        trial.reset()
        ended = trial.run(nan_step=step)
        problems = ended.problems()
        for run in trial.cell.glob(runs):
            result = json.loads((run / "result.json").read_text())
            if (result["status"], result["skipped_steps"]) != ("finished", 1):
                problems.append(f"{result['status']}, {result['skipped_steps']} steps skipped")
            problems += _not_finite(run)
        tried.add(f"step {step}", "the step is skipped, the run ends", problems)
    for step in trial.some((2, 1)):
        trial.reset()
        ended = trial.run(nan_step=-step)
        problems = ended.problems((0, 1))
        for run in trial.cell.glob(runs):
            result = json.loads((run / "result.json").read_text())
            if result["skipped_steps"] != result["steps"] - step:
                problems.append(f"{result['skipped_steps']} of {result['steps']} steps skipped")
            problems += _not_finite(run)
        tried.add(f"from step {step}", "no bad weights are saved", problems)
    return tried


def _not_finite(run: Path) -> list[str]:
    import numpy as np
    from safetensors.numpy import load_file

    return [
        f"{path}: {name} is not finite"
        for path in run.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
        if not np.isfinite(tensor).all()
    ]


def kinds_first(files: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    """All files in random order, but one of each kind before a second of any; names of one kind
    differ in their numbers."""
    seen: Counter[tuple[str, str]] = Counter()
    order: dict[tuple[str, str], int] = {}
    for state, file in rng.sample(files, len(files)):
        kind = state, re.sub(r"[0-9a-f]{16}|\d+", "#", file)
        order[state, file] = seen[kind]
        seen[kind] += 1
    return sorted(order, key=order.__getitem__)


def flipped_bits(trial: Trial, only: int | None = None) -> Tried:
    """A bit of each file: of the input, of what a finished and what a killed command left."""
    tried = Tried()
    files = [("new", f"in/{name}") for name in contents(trial.template / "in")]
    files += [("finished", f"out/{name}") for name in trial.expected]
    files += [("killed", f"out/{name}") for name in contents(trial.interrupt())]
    if trial.sample is not None:
        files = kinds_first(files, random.Random(0))[: trial.sample]
    for state, file in files:
        for number in range(1 if trial.sample else 3):
            path = Path(file)
            trial.reset(state)
            rng = random.Random(f"{trial.command.name}/{path}/{state}/{number}")
            bit = flip(trial.cell / path, rng)
            name = f"{state}, {path}, bit {bit}"
            ended = trial.run(again=state != "new")
            problems = ended.problems(_codes(trial.command))
            if problems or ended.code:
                tried.add(name, "refused in one line", problems)
                continue
            problems = trial.is_as_expected(ended)
            kept = [problem for problem in problems if "/damaged-step-" not in problem]
            if not kept:
                aside = "set aside, then the same result"
                tried.add(name, aside if problems else "the same result", [])
            elif state != "new" and problems == [f"{path.relative_to('out')}: other"]:
                tried.add(name, "not read by the command", [])
            elif any(path.match(pattern) for pattern in trial.command.unchecked):
                tried.add(name, "other data, the result that belongs to it", [])
            else:
                tried.add(name, "", problems)
    return tried


LARGE = 5 << 30
"""Bytes of a file without content, more than is read of any file at once."""


def foreign_folder(trial: Trial, only: int | None = None) -> Tried:
    """What the command left, each file and folder of it in turn as a link out of the folder, each
    file as a pipe and as a huge file: as somebody else may have made it."""
    tried = Tried()
    states = {"finished": trial.finished, "killed": trial.interrupt()}
    found = [
        (state, path.relative_to(folder).as_posix())
        for state, folder in states.items()
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.parent != folder  # whose name the user gives
    ]
    if trial.sample is not None:
        found = kinds_first(found, random.Random(0))[: trial.sample]
    outside = trial.server.folder / "outside"
    for state, name in found:
        for what in ("link", "pipe", "huge file"):
            trial.reset(state)
            path = trial.cell / "out" / name
            if what != "link" and path.is_dir():
                continue
            shutil.rmtree(outside, ignore_errors=True)
            outside.mkdir()
            shutil.move(path, outside)
            if what == "link":
                path.symlink_to(outside / path.name)
            elif what == "pipe":
                os.mkfifo(path)
            else:
                path.touch()
                os.truncate(path, LARGE)
            before = _bytes_below(outside)
            ended = trial.run(again=True)
            problems = ended.problems(_codes(trial.command))
            if _bytes_below(outside) != before:
                problems.append("something outside was changed")
            seen = "refused in one line" if ended.code else "nothing outside is changed"
            tried.add(f"{state}, {name}, {what}", seen, problems)
    return tried


def _bytes_below(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def rank_dies(trial: Trial, only: int | None = None) -> Tried:
    """One of two processes is killed, in the first attempt of torchrun."""
    tried = Tried()
    for parallel in ("ddp", "fsdp")[: trial.sample]:
        expected: dict[str, str] = {}
        for step in (0, *trial.some((5, 4, 3))):
            trial.reset()
            ended = torchrun(trial, parallel, step % 2, step)
            problems = [] if ended.returncode == 0 else [ended.stdout[-1500:]]
            run = trial.cell / "out/run"
            found = contents(run) if run.exists() else {}
            if step == 0:
                expected = found
                continue
            resumed = "Resumed at step" in ended.stdout
            if not resumed and step > 3:  # in step 3 the only checkpoint may still be in writing
                problems.append("did not resume")
            problems += differences(found, expected) + leftovers(trial.cell / "out")
            seen = "the same result" if resumed else "began again, the same result"
            tried.add(f"{parallel}, step {step}", seen, problems)
    return tried


def torchrun(trial: Trial, parallel: str, rank: int, step: int) -> subprocess.CompletedProcess[str]:
    """Train with two processes, of which one is killed before a step (0: none is)."""
    killer = trial.cell / "killer.py"
    killer.write_text(KILLER.format(rank=rank, step=step))
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "parcae"]
    command += [*trial.command.arguments, "--run.parallel", parallel, "--import", str(killer)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command,
        cwd=trial.cell,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


KILLER = """
import os, signal
from parcae.training.learner import Learner

take_step = Learner.take_step

def take_or_die(self, progress):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and self.workers.rank == {rank} and self.step + 1 == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(self, progress)

Learner.take_step = take_or_die
"""
"""A file for --import."""


def flip(path: Path, rng: random.Random) -> int:
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return bit


@dataclass(frozen=True)
class FaultKind:
    """One row of the matrix: what is promised, how it is tried."""

    name: str
    promise: str
    how: str
    run: Callable[[Trial, int | None], Tried]
    commands: Callable[[Command], bool] = lambda command: True
    """Those to which it can happen."""


FAULTS = {
    kind.name: kind
    for kind in (
        FaultKind(
            "kill -9",
            "no half-written file has its final name; the same command again ends as if nothing "
            "had happened, bit for bit, and removes what was left",
            "SIGKILL at each change of a file, after half of a write; every other time once more "
            "while it continues. `serve`: at each read",
            killed,
        ),
        FaultKind(
            "disk full",
            "one line and exit code 2, or a result that is complete; then as above",
            "ENOSPC from each creation or write on, the first write cut in half",
            _failing("fail from", "grow", errno.ENOSPC),
        ),
        FaultKind(
            "error of a write",
            "the same",
            "EIO at each change of a file: open, write, flush, rename, delete",
            _failing("fail once", "change", errno.EIO),
        ),
        FaultKind(
            "error of a read",
            "the same",
            "EIO at each opening or reading of a file",
            _failing("fail once", "read", errno.EIO),
        ),
        FaultKind(
            "short writes",
            "no effect",
            "every write takes half of its data, at most 1,000 or 7 bytes",
            short_writes,
        ),
        FaultKind(
            "read-only folder",
            "one line, exit code 2, nothing is written; `serve` works",
            "EROFS at every change",
            read_only,
        ),
        FaultKind(
            "clock set back",
            "no effect",
            "every look at the clock sets it back by a second, an hour or a year",
            clock_back,
        ),
        FaultKind(
            "two processes",
            "one does the work and the other says in one line that it cannot, or both write the "
            "same",
            "the same command twice, up to 0.4 s apart",
            two_processes,
        ),
        FaultKind(
            "NaN gradients",
            "the step is not taken; where no step is possible any more, the run ends as diverged "
            "and its last checkpoint is finite",
            "gradients set to NaN in one step, and from a step on",
            nan_gradients,
            lambda command: command.trains,
        ),
        FaultKind(
            "flipped bit",
            "found where a checksum covers the file, else the result that belongs to the content; "
            "one line, never a trace",
            "a random bit of files of every kind: of the input, of a finished output, of what a "
            "killed command left",
            flipped_bits,
        ),
        FaultKind(
            "foreign folder",
            "one line, or the usual result; nothing outside of the folder is written or deleted, "
            "nothing is waited for",
            "files and folders of a finished output, and of what a killed command left, as links "
            "out of the folder, as pipes, as files of 5 GiB",
            foreign_folder,
            lambda command: not command.serves,
        ),
        FaultKind(
            "a rank dies",
            "`torchrun --max-restarts` starts the processes again, and the run ends as an "
            "uninterrupted one, bit for bit",
            "SIGKILL to one of two processes at a step, with and without shards",
            rank_dies,
            lambda command: command.name == "train",
        ),
    )
}
