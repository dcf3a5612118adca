"""Runs of a sweep as local processes, several at a time, each independent of the others.

A run that is killed is started again from its last checkpoint, at most `ATTEMPTS` times; one that
fails is reported, and the others continue. When the sweep is asked to stop, its runs save and stop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from parcae.files import LARGEST_LINES, no_link, open_file, writing
from parcae.machine import cores
from parcae.runs import FINAL_STATUSES, read_result, read_status
from parcae.schema import require_range
from parcae.sweeps.worker import RunRequest, command

ATTEMPTS = 3
POLL_SECONDS = 0.2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Observer(Protocol):
    """Is called while runs start and end."""

    def started(self, request: RunRequest, attempt: int) -> None: ...
    def ended(self, request: RunRequest, failure: str | None) -> None: ...
    def waiting(self) -> None: ...


class StopRequest(Protocol):
    """`asked` becomes true when the sweep should stop."""

    @property
    def asked(self) -> bool: ...


@dataclass
class _Process:
    request: RunRequest
    process: subprocess.Popen[bytes]
    slot: int
    attempt: int
    signalled: bool = False
    """SIGTERM is sent once: a second one may arrive after its handler is gone."""


@dataclass
class LocalWorkers:
    """`run` returns when all runs have ended, or after a stop request when all have saved."""

    workers: int
    environments: Sequence[Mapping[str, str]]
    """The environment variables of each worker."""
    active: list[_Process] = field(default_factory=list)

    def run(self, requests: Sequence[RunRequest], observer: Observer, stop: StopRequest) -> None:
        waiting = [(request, 1) for request in requests]
        try:
            while self.active or (waiting and not stop.asked):
                if stop.asked:
                    self._ask_to_stop()
                ended = [a for a in self.active if a.process.poll() is not None]
                self.active = [a for a in self.active if a not in ended]
                restart = [a for a in ended if self._should_restart(a, stop.asked)]
                waiting = [(a.request, a.attempt + 1) for a in restart] + waiting
                started = []
                while waiting and len(self.active) < self.workers and not stop.asked:
                    started.append(waiting.pop(0))
                    self.active.append(self._start(*started[-1]))
                # After the start of others, which train while the observer evaluates these.
                for process in ended:
                    if process not in restart:
                        observer.ended(process.request, self._failure(process, stop.asked))
                for request, attempt in started:
                    observer.started(request, attempt)
                observer.waiting()
                time.sleep(POLL_SECONDS)
        finally:
            self._ask_to_stop()
            for active in self.active:
                active.process.wait()

    def _start(self, request: RunRequest, attempt: int) -> _Process:
        slot = next(s for s in range(self.workers) if s not in {a.slot for a in self.active})
        process = start_process(request, self.environments[slot])
        return _Process(request, process, slot, attempt)

    def _ask_to_stop(self) -> None:
        for active in self.active:
            if not active.signalled and active.process.poll() is None:
                active.signalled = True
                active.process.send_signal(signal.SIGTERM)

    def _should_restart(self, ended: _Process, stopping: bool) -> bool:
        return _was_cut_short(ended) and not stopping and ended.attempt < ATTEMPTS

    def _failure(self, ended: _Process, stopping: bool) -> str | None:
        if _was_cut_short(ended) and stopping:
            return None
        return failure(ended.request, ended.process.returncode)


def _was_cut_short(ended: _Process) -> bool:
    status = read_status(ended.request.run)
    killed = ended.process.returncode < 0
    return status not in FINAL_STATUSES and (killed or status == "interrupted")


def start_process(
    request: RunRequest, environment: Mapping[str, str] | None = None, processes: int = 1
) -> subprocess.Popen[bytes]:
    """Start a run in a session of its own: Ctrl-C reaches the sweep, which then asks it to stop."""
    with writing(request.log):
        request.log.parent.mkdir(parents=True, exist_ok=True)
        log = open(request.log, "ab", opener=no_link)  # noqa: SIM115 (closed below)
    with log:
        return subprocess.Popen(  # noqa: S603 (this Python, no shell)
            command(request, processes),
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def failure(request: RunRequest, code: int) -> str | None:
    """Why a run whose process ended with this exit code did not finish; None if it did."""
    status = read_status(request.run)
    if status == "diverged":
        result = read_result(request.run)
        diagnosis = None if result is None else result.diagnosis
        return f"diverged: {diagnosis or 'the loss is not finite'}"
    if status == "finished":
        return None
    if status == "interrupted":
        return "interrupted by a signal from outside the sweep"
    if code < 0:
        return f"killed by {signal.Signals(-code).name} {ATTEMPTS} times"
    return last_line(request.log) or f"exit code {code}"


def last_line(log: Path) -> str:
    """The last line that a run printed; empty if there is none."""
    try:
        with open_file(log, LARGEST_LINES) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 4096))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()]
    return lines[-1].removeprefix("parcae: ") if lines else ""


def threads_per_worker(workers: int) -> int:
    """OMP_NUM_THREADS if it is set, else an even share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else max(1, cores() // workers)


def visible_devices() -> list[str]:
    """GPUs by the names that CUDA_VISIBLE_DEVICES uses."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


def environments(workers: int, devices: Sequence[str] = ()) -> list[dict[str, str]]:
    """The environment of each worker: its share of the threads, and one of the GPUs `devices`."""
    threads = str(threads_per_worker(workers))
    shared = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, threads)}
    if not devices:
        return [dict(shared) for _ in range(workers)]
    return [
        {**shared, "CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} for slot in range(workers)
    ]


def worker_count(workers: int | None) -> int:
    """How many runs train at the same time; one for each GPU by default."""
    if workers is None:
        return max(1, torch.cuda.device_count())
    require_range("workers", workers, at_least=1)
    return workers
