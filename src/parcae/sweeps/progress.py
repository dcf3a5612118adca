"""What a person sees of a sweep that runs: a bar with the time left, or plain lines; and what is
kept of it: the table of runs, anew whenever a run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.progress import TextColumn

from parcae import console
from parcae.runs import last_step
from parcae.sweeps.folder import SweepFolder
from parcae.sweeps.launch import Job
from parcae.sweeps.plan import PlannedRun
from parcae.sweeps.run_state import outcome_of

SECONDS_BETWEEN_LOOKS = 1.0
ENOUGH = 0.01
"""Share of the work after which the time left is told from the pace so far."""


class Watch(console.LiveProgress):
    def __init__(
        self,
        folder: SweepFolder,
        runs: Sequence[PlannedRun],
        to_do: Sequence[PlannedRun],
        weights: Mapping[str, float],
        expected: float | None,
        clock_: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights`: how long each run of `to_do` takes, in any unit; `expected`: all, seconds."""
        super().__init__(TextColumn("[cyan]{task.fields[left]}"))
        self.folder, self.runs = folder, runs
        self.to_do = {run.name: run for run in to_do}
        self.weights, self.expected = weights, expected
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        self.active: dict[str, float] = {}
        """Share of each running run that lies behind."""
        self._clock, self._started = clock_, clock_()
        self._looked = 0.0
        self._before: dict[str, float] = {run.name: self._share(run) for run in to_do}
        self._task = self._progress.add_task("", total=1.0, left="")

    def started(self, job: Job, attempt: int) -> None:
        self.folder.begin(job.name)
        self.active[job.name] = self._before[job.name]
        again = f", attempt {attempt}" if attempt > 1 else ""
        at = last_step(job.run)
        behind = f" (had come to step {at}{again})" if at else again
        self.print(f"started   {job.name}{behind}{self._outlook()}")

    def ended(self, job: Job, failure: str | None) -> None:
        self.active.pop(job.name, None)
        if failure is not None:
            self.failed[job.name] = failure
            self.folder.note_failure(job.name, failure)
            self.print(f"failed    {job.name}: {failure} See {job.log}")
        elif outcome_of(job.run).stage == "finished":
            self.done.add(job.name)
            self.folder.collect(self.runs)
            self.print(f"finished  {job.name}{self._outlook()}")
        else:
            self.print(f"stopped   {job.name}")

    def waiting(self) -> None:
        now = self._clock()
        if now < self._looked + SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        for name in self.active:
            self.active[name] = self._share(self.to_do[name])
        self._progress.update(
            self._task,
            description=f"{len(self.done)} of {len(self.to_do)} done, {len(self.active)} running",
            completed=self._behind(),
            left=self._left() or "",
        )

    def _share(self, run: PlannedRun) -> float:
        return min(1.0, last_step(self.folder.run(run.name)) / run.steps)

    def _behind(self, start: bool = False) -> float:
        total = sum(self.weights[name] for name in self.to_do)
        shares = self._before if start else {**self._before, **self.active}
        ended = set() if start else {*self.done, *self.failed}
        return (
            sum(
                self.weights[name] * (1.0 if name in ended else shares[name]) for name in self.to_do
            )
            / total
        )

    def _left(self) -> str | None:
        behind, before = self._behind(), self._behind(start=True)
        took = self._clock() - self._started
        if behind > before + ENOUGH:
            return f"about {console.format_duration(took * (1 - behind) / (behind - before))} left"
        return (
            None
            if self.expected is None
            else f"about {console.format_duration(self.expected)} left"
        )

    def _outlook(self) -> str:
        """For plain lines; the bar has its own."""
        if console.out.is_terminal:
            return ""
        left = self._left()
        return f"; {len(self.done)} of {len(self.to_do)} done" + (f", {left}" if left else "")
