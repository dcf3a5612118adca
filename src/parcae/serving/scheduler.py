"""The thread that owns an engine: it takes jobs from a fair queue, steps, and hands out tokens.

    scheduler = Scheduler(engine, settings, metrics)
    job = Job(request, emit=events.put)      # emit is called in the scheduler's thread
    scheduler.submit([job])                  # ApiError 429 if the queue is full
    scheduler.cancel([job])
    scheduler.close(seconds=30)              # finish what has begun

A job is one text. Its events are Deltas, the last one with `finish`, or one ApiError. Jobs wait
here, one queue per client served in turn, until the engine has a row for them; the engine then
batches them with all others, whatever their depths and positions.

If a pass of the engine raises, the jobs in it run again, each alone, so that only the one at fault
fails. Sampling is seeded, so the tokens that were already handed out are repeated and skipped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parcae.config import ConfigError
from parcae.infer.engine import Engine
from parcae.infer.request import Request
from parcae.infer.sampling import NonFiniteLogits
from parcae.infer.sequence import Finish, Piece, RunningSequence, TokenLogprob
from parcae.serving.metrics import Metrics
from parcae.serving.protocol import ApiError, busy, stopping
from parcae.serving.settings import ServerSettings

log = logging.getLogger("parcae.serving")


@dataclass(frozen=True)
class Delta:
    """What one step added to a text."""

    pieces: list[Piece]
    logprobs: list[TokenLogprob]
    """One per token, if the request asked for them."""
    finish: Finish | None = None
    """Set in the last delta."""

    def then(self, later: Delta) -> Delta:
        """This delta and the one after it as one."""
        return Delta([*self.pieces, *later.pieces], [*self.logprobs, *later.logprobs], later.finish)


@dataclass(eq=False)
class Job:
    """One text to generate."""

    request: Request
    emit: Callable[[Delta | ApiError], None]
    client: str = ""
    """The number of its API key, a space, and its address."""
    seconds: float = math.inf
    """The longest time from now to the last token."""
    stream: bool = True
    """Whether tokens are handed out as they are generated, or all at the end."""
    submitted: float = field(default_factory=time.monotonic)
    together: Sequence[Job] = ()
    """The jobs of the same API request, this one among them."""
    admitted: bool = False
    sequence: RunningSequence | None = None
    cancelled: bool = False
    alone: bool = False
    """Whether it runs again without others, after an exception."""
    emitted: list[int | None] = field(default_factory=list)
    """The tokens handed out; they are skipped if the job runs again."""
    taken: int = 0
    """Pieces taken from the current sequence."""
    held: list[Piece] = field(default_factory=list)
    """Pieces to hand out at the end."""

    @property
    def key(self) -> str:
        """The client's API key, by its number."""
        return self.client.partition(" ")[0]

    @property
    def has_begun(self) -> bool:
        """Whether some text of the same API request is, or was, in the engine: then this one is
        waited for too, because a request is answered whole."""
        return any(job.admitted for job in self.together)

    def take(self) -> list[Piece]:
        """The new pieces of its sequence. RuntimeError if a second run differs from the first."""
        assert self.sequence is not None
        new = []
        while self.sequence.pieces:
            piece = self.sequence.pieces.popleft()
            if self.taken == len(self.emitted):
                self.emitted.append(piece.token)
                new.append(piece)
            elif self.emitted[self.taken] != piece.token:
                raise RuntimeError("a second run gave other tokens")
            self.taken += 1
        return new


class FairQueue:
    """Jobs by client; `pop` serves clients in turn, and each one's jobs in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[Job]:
        return (job for jobs in self._jobs.values() for job in jobs)

    def add(self, jobs: Sequence[Job]) -> list[Job] | None:
        """Add the jobs of a request, all or none. Returns the jobs that lose their place to them,
        or None if there is no room: in a full queue the newest job of the client with the most
        gives way, as long as that has more than this client."""
        client = jobs[0].client
        own = len(self._jobs.get(client, ())) + len(jobs)
        others = [
            [job for job in waiting if not job.has_begun]
            for name, waiting in self._jobs.items()
            if name != client
        ]
        displaced: list[Job] = []
        for _ in range(len(self) + len(jobs) - self.size):
            longest = max(others, key=len, default=[])
            if len(longest) <= own:
                return None
            displaced.append(longest.pop())
        self.remove(displaced)
        self._jobs.setdefault(client, deque()).extend(jobs)
        return displaced

    def pop(self, may_begin: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """The job whose turn it is; clients whose next job may not begin keep their turn."""
        for client, jobs in list(self._jobs.items()):
            if jobs and not may_begin(jobs[0]):
                continue
            del self._jobs[client]
            if not jobs:
                continue
            job = jobs.popleft()
            if jobs:
                self._jobs[client] = jobs  # at the end: the others are served first
            return job
        return None

    def remove(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._jobs[job.client].remove(job)


State = Literal["ok", "draining", "closed", "failed"]


class Scheduler:
    def __init__(self, engine: Engine, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.keys = 1
        """The number of API keys among which rows are shared."""
        self.state: State = "ok"
        self._changed = threading.Condition()
        """Guards the state, the queue and `Job.cancelled`."""
        self._waiting = FairQueue(settings.max_waiting)
        self._retries: deque[Job] = deque()
        self._running: list[Job] = []
        self._thread = threading.Thread(target=self._main, name="parcae-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._retries)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of a request, all or none. ApiError 429 if there is no room, 503 if the
        server stops."""
        with self._changed:
            if self.state != "ok":
                raise stopping()
            for job in jobs:
                job.together = jobs
            displaced = self._waiting.add(jobs)
            if displaced is None:
                raise self._queue_full()
            for job in displaced:
                job.emit(self._queue_full())
            self._changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End jobs; those that have ended are ignored. No event follows."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def drain(self) -> None:
        """Refuse new requests, and those that wait, with 503; what has begun continues."""
        with self._changed:
            if self.state == "ok":
                self.state = "draining"
            refused = [job for job in self._waiting if not job.has_begun]
            self._waiting.remove(refused)
            for job in refused:
                job.emit(stopping())
            self._changed.notify()

    def end(self) -> None:
        """End all jobs with 503 after the current step, and the thread. Does not wait."""
        with self._changed:
            self.state = "failed" if self.state == "failed" else "closed"
            self._changed.notify_all()

    def close(self, seconds: float = 0.0) -> None:
        """Drain, wait this long for what has begun, end the rest with 503, and stop the thread."""
        self.drain()
        with self._changed:
            self._changed.wait_for(lambda: not (self.running or self.waiting), seconds)
        self.end()
        self._thread.join()

    def _main(self) -> None:
        try:
            while self._wait_for_work():
                self._drop_cancelled_and_late()
                self._admit()
                self._step()
                self._hand_out()
        except Exception as error:
            log.error("the engine's thread ended: %s", type(error).__name__, exc_info=debug(error))
            self.state = "failed"
        self._end_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.notify()  # `close` waits for the last running job
            self._changed.wait_for(lambda: self.running or self.waiting or self.state == "closed")
            return self.state != "closed"

    def _drop_cancelled_and_late(self) -> None:
        with self._changed:
            for job in list(self._waiting):
                error = self._overdue(job)
                if error is None and not job.cancelled:
                    continue
                self._waiting.remove([job])
                if error is not None and not job.cancelled:
                    job.emit(error)
        ended = []
        for job in (*self._running, *self._retries):
            error = self._overdue(job)
            if error is None and not job.cancelled:
                continue
            ended.append(job)
            if job.sequence is not None:
                self.engine.cancel(job.sequence)
            if error is not None and not job.cancelled:
                job.emit(error)
        self._running = [job for job in self._running if job not in ended]
        self._retries = deque(job for job in self._retries if job not in ended)

    def _overdue(self, job: Job) -> ApiError | None:
        """The error with which a job ends that waits or runs for too long."""
        waited = time.monotonic() - job.submitted
        if waited > job.seconds:
            return ApiError(504, "The request took too long.", code="timeout")
        if waited <= self.settings.queue_seconds:
            return None
        if not job.has_begun:
            return busy("The request waited too long in the queue.")
        has_no_row = job.sequence is not None and job.sequence.row < 0
        if has_no_row and not any(other.emitted for other in job.together):
            return busy("There is no memory for the request's cache now.")
        return None

    def _admit(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.sequence, job.taken = self.engine.submit(job.request), 0
            except Exception as error:
                self._running.remove(job)
                job.emit(self._failure(error))

    def _next(self) -> Job | None:
        """Move a job to the running ones, if the engine has a row for it.

        What memory has no row for stays in the queue, but for one that is in front of the others.
        """
        is_full = len(self._running) >= self.engine.max_batch_size
        has_no_row = self.engine.waiting > self.engine.rows.free
        if is_full or has_no_row or any(job.alone for job in self._running):
            return None
        with self._changed:
            if self._retries:
                job = None if self._running else self._retries.popleft()
            else:
                job = self._waiting.pop(self._may_begin)
            if job is not None:
                job.admitted = True
                self._running.append(job)
            return job

    def _may_begin(self, job: Job) -> bool:
        """Whether, if its key has a row, enough are left for the keys that have none."""
        busy, rows = {other.key for other in self._running}, self.engine.max_batch_size
        kept = min(self.keys - len(busy), max(rows // 8, 1), rows - 1)
        return job.key not in busy or rows - len(self._running) > kept

    def _step(self) -> None:
        if not self._running:
            return
        start = time.perf_counter()
        try:
            self.engine.step()
        except Exception as error:
            sequences = [job.sequence for job in self._running if job.sequence is not None]
            for sequence in sequences:
                sequence.fail(error)
            self.engine.cancel(*sequences)
        self.metrics.count_step(len(self._running), time.perf_counter() - start)

    def _hand_out(self) -> None:
        running, events = [], []
        for job in self._running:
            sequence = job.sequence
            assert sequence is not None
            try:
                events.append((job, self._delta(job, sequence)))
            except RuntimeError as error:
                self.engine.cancel(sequence)
                events.append((job, self._failure(error)))
                continue
            if sequence.finish is None:
                running.append(job)
            elif sequence.error is not None:
                events.append((job, self._retry_or_fail(job, sequence.error)))
        self._running = running
        # All at once: the first wakes up the receivers, who then want the interpreter's lock.
        for job, event in events:
            if event is not None:
                job.emit(event)

    def _delta(self, job: Job, sequence: RunningSequence) -> Delta | None:
        """What is to be handed out now."""
        pieces = job.take()
        if not pieces:
            return None
        if len(job.emitted) == len(pieces):
            self.metrics.count_start(job.request, sequence.reused, job.submitted)
        self.metrics.count_tokens(pieces)
        finish = None if pieces[-1].completion is None else pieces[-1].completion.finish
        if not job.stream:
            job.held += pieces
            pieces = job.held
            if finish is None:
                return None
        first = len(job.emitted) - len(pieces)
        return Delta(pieces, sequence.logprobs[first : job.taken], finish)

    def _retry_or_fail(self, job: Job, error: Exception) -> ApiError | None:
        """Run the job again, alone, or return the error with which it ends."""
        is_alone = len(self._running) == 1 or job.alone
        if is_alone or isinstance(error, ConfigError | NonFiniteLogits):
            return self._failure(error)
        job.alone, job.sequence = True, None
        self._retries.append(job)
        self.metrics.retries += 1
        return None

    def _failure(self, error: Exception) -> ApiError:
        """The error with which a job ends."""
        if isinstance(error, ConfigError):  # its row did not fit in memory
            return busy("There is no memory for the request's cache now.")
        log.error("a request failed: %s", type(error).__name__, exc_info=debug(error))
        self.metrics.failures += 1
        return ApiError(500, "The engine failed on this request.", code="engine_error")

    def _end_all(self) -> None:
        with self._changed:
            jobs = [*self._running, *self._retries, *self._waiting]
            self._waiting = FairQueue(self.settings.max_waiting)
            self._changed.notify_all()
        sequences = [job.sequence for job in self._running if job.sequence is not None]
        self._running, self._retries = [], deque()
        for job in jobs:
            job.emit(stopping())
        if self.state != "failed":
            self.engine.cancel(*sequences)

    def _queue_full(self) -> ApiError:
        self.metrics.refused += 1
        return busy(f"The queue is full: {self.settings.max_waiting} texts may wait.")


def debug(error: Exception) -> Exception | None:
    """The exception for the log if the user debugs: its traceback may contain a prompt."""
    import os

    return error if os.environ.get("PARCAE_DEBUG") else None
