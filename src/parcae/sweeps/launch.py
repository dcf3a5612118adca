"""Runs of a sweep as local processes: so many at a time, each for itself.

A run that is killed goes on from its last checkpoint, up to `ATTEMPTS` times; one that fails is
noted, and the others go on. When the sweep is asked to stop, its runs save and stop, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from parcae.files import writing
from parcae.sweeps import worker
from parcae.sweeps.run_state import outcome_of

ATTEMPTS = 3
SECONDS_BETWEEN_LOOKS = 0.2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A run to be done: its recipe, its folder, and where it prints."""

    name: str
    recipe: Path
    run: Path
    log: Path


class Observer(Protocol):
    """Is told what happens while it happens."""

    def started(self, job: Job, attempt: int) -> None: ...
    def ended(self, job: Job, failure: str | None) -> None: ...
    def waiting(self) -> None: ...


class Wish(Protocol):
    @property
    def asked(self) -> bool: ...


@dataclass
class _Active:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    attempt: int
    told: bool = False
    """To stop. Once is enough: a second SIGTERM may come when it no longer listens."""


@dataclass
class LocalWorkers:
    """`run` returns when all jobs are done, or when `stop` is asked for and all have saved."""

    workers: int
    environments: Sequence[Mapping[str, str]]
    """Of each worker."""
    active: list[_Active] = field(default_factory=list)

    def run(self, jobs: Sequence[Job], observer: Observer, stop: Wish) -> None:
        waiting = [(job, 1) for job in jobs]
        try:
            while self.active or (waiting and not stop.asked):
                if stop.asked:
                    self._ask_to_stop()
                while waiting and len(self.active) < self.workers and not stop.asked:
                    job, attempt = waiting.pop(0)
                    self.active.append(self._start(job, attempt))
                    observer.started(job, attempt)
                for one in [a for a in self.active if a.process.poll() is not None]:
                    self.active.remove(one)
                    again = self._end(one, observer, stop.asked)
                    waiting = [(one.job, one.attempt + 1), *waiting] if again else waiting
                observer.waiting()
                time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            self._ask_to_stop()
            for one in self.active:
                one.process.wait()

    def _start(self, job: Job, attempt: int) -> _Active:
        slot = next(s for s in range(self.workers) if s not in {a.slot for a in self.active})
        process = start_process(job, self.environments[slot])
        return _Active(job, process, slot, attempt)

    def _ask_to_stop(self) -> None:
        for one in self.active:
            if not one.told and one.process.poll() is None:
                one.told = True
                one.process.send_signal(signal.SIGTERM)

    def _end(self, one: _Active, observer: Observer, stopping: bool) -> bool:
        """Whether it is to be tried again."""
        outcome, code = outcome_of(one.job.run), one.process.returncode
        cut_short = not outcome.is_final and (code < 0 or outcome.stage == "interrupted")
        if cut_short and not stopping and one.attempt < ATTEMPTS:
            return True
        observer.ended(one.job, None if cut_short and stopping else failure(one.job, code))
        return False


def start_process(
    job: Job, environment: Mapping[str, str] | None = None, processes: int = 1
) -> subprocess.Popen[bytes]:
    """The run as a process of its own session: Ctrl-C reaches the sweep, which passes it on."""
    with writing(job.log):
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log = job.log.open("ab")
    with log:
        return subprocess.Popen(
            worker.command(job.recipe, job.run, processes),
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def failure(job: Job, code: int) -> str | None:
    """Why a run that ended with this exit code is not a result; None if it is one."""
    outcome = outcome_of(job.run)
    if outcome.stage == "diverged":
        return f"diverged: {outcome.result.get('diagnosis') or 'no finite loss'}"
    if outcome.stage == "finished":
        return None
    if outcome.stage == "interrupted":
        return "stopped from outside again and again"
    if code < 0:
        return f"killed by {signal.Signals(-code).name} again and again"
    return last_line(job.log) or f"exit code {code}"


def last_line(log: Path) -> str:
    """For a person: what the run said last."""
    try:
        with log.open("rb") as stream:
            _seek_back(stream, 4096)
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("parcae: ") if said else ""


def _seek_back(stream: IO[bytes], count: int) -> None:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - count))


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(workers: int) -> int:
    """Of each worker: what the environment says, else an even share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else max(1, cores() // workers)


def visible_devices() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


def environments(workers: int, devices: Sequence[str] = ()) -> list[dict[str, str]]:
    """Threads are shared out among the workers, and so are GPUs, named by `devices`."""
    threads = str(threads_of(workers))
    found = []
    for slot in range(workers):
        own = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, threads)}
        if devices:
            own["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        found.append(own)
    return found
