"""The terminal output of a sweep: its plan, a line for each run that starts or ends, and a bar with
the time left. Reads run folders; writes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.progress import TextColumn

from parcae import console
from parcae.laws.isoflop import MIN_PARABOLA_POINTS
from parcae.runs import last_step, read_status
from parcae.sweeps.estimate import Estimate
from parcae.sweeps.folder import RunState
from parcae.sweeps.grid import PlannedRun
from parcae.sweeps.worker import RunRequest

POLL_SECONDS = 1.0
ENOUGH = 0.01
"""Share of the work after which the time left follows from the speed so far."""


class SweepProgress(console.LiveProgress):
    """Shows local runs while they train; an `Observer` of `LocalWorkers`."""

    def __init__(
        self,
        requests: Mapping[str, RunRequest],
        steps: Mapping[str, int],
        weights: Mapping[str, float],
        expected: float | None,
        *,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All by run name. `steps`: the length of each run. `weights`: how long each takes, in any
        unit. `expected`: seconds for all of them, if known."""
        super().__init__(TextColumn("[cyan]{task.fields[left]}"), shown=shown)
        self.requests, self.steps = requests, steps
        self.weights, self.expected = weights, expected
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        self.active: dict[str, float] = {}
        """The fraction of each running run that is done."""
        self._clock, self._started, self._looked = clock, clock(), 0.0
        self._at_start = {name: self._fraction(name) for name in requests}
        self._task = self._progress.add_task("", total=1.0, left="")

    def started(self, request: RunRequest, attempt: int) -> None:
        self.active[request.name] = self._at_start[request.name]
        step = last_step(request.run)
        details = [
            *([f"continues after step {step}"] if step else []),
            *([f"attempt {attempt}"] if attempt > 1 else []),
        ]
        text = f" ({', '.join(details)})" if details else ""
        self.print(f"started   {request.name}{text}{self._outlook()}")

    def ended(self, request: RunRequest, failure: str | None) -> None:
        self.active.pop(request.name, None)
        if failure is not None:
            self.failed.add(request.name)
            self.print(f"failed    {request.name}: {failure} See {request.log}")
        elif read_status(request.run) == "finished":
            self.finished.add(request.name)
            self.print(f"finished  {request.name}{self._outlook()}")
        else:
            self.print(f"stopped   {request.name}")

    def waiting(self) -> None:
        now = self._clock()
        if now < self._looked + POLL_SECONDS:
            return
        self._looked = now
        for name in self.active:
            self.active[name] = self._fraction(name)
        self._progress.update(
            self._task,
            description=f"{self._count()}, {len(self.active)} running",
            completed=self._done(),
            left=self._left() or "",
        )

    def _count(self) -> str:
        return f"{len(self.finished)} of {len(self.requests)} finished"

    def _fraction(self, name: str) -> float:
        return min(1.0, last_step(self.requests[name].run) / self.steps[name])

    def _done(self) -> float:
        """The fraction of all work that is done; a failed run has no work left."""
        ended = dict.fromkeys((*self.finished, *self.failed), 1.0)
        return self._weighted_mean({**self._at_start, **self.active, **ended})

    def _weighted_mean(self, fractions: Mapping[str, float]) -> float:
        total = sum(self.weights[name] for name in self.requests)
        return sum(self.weights[name] * fractions[name] for name in self.requests) / total

    def _left(self) -> str | None:
        done, at_start = self._done(), self._weighted_mean(self._at_start)
        left = self.expected
        if done >= 1:
            return None
        if done > at_start + ENOUGH:
            left = (self._clock() - self._started) * (1 - done) / (done - at_start)
        return None if left is None else f"about {console.format_duration(round(left))} left"

    def _outlook(self) -> str:
        """For plain lines; the bar shows the same."""
        if console.out.is_terminal:
            return ""
        left = self._left()
        return f"; {self._count()}" + (f", {left}" if left else "")


def print_plan(
    runs: Sequence[PlannedRun],
    states: Mapping[str, RunState],
    to_do: Sequence[PlannedRun],
    estimate: Estimate,
    workers: int,
    folder: Path,
) -> None:
    """Print a table of all runs, what is left to do, and how long that takes."""
    columns = ("run", "loops", "with gradient", "parameters", "effective", "tokens", "steps")
    rows = [
        (
            run.name,
            f"{run.mean_loops:g}",
            run.recipe.model.loop.gradient_loops,
            console.format_count(run.parameters),
            console.format_count(run.effective_parameters),
            console.format_count(run.tokens),
            f"{run.steps:,}",
            console.format_flops(run.flops),
            console.format_duration(estimate.seconds[run.name])
            if run.name in estimate.seconds
            else "",
            states[run.name],
        )
        for run in runs
    ]
    title = f"{console.format_items(len(runs), 'run')} in {folder}"
    console.out.print(console.table(title, (*columns, "FLOPs", "duration", "state"), rows))
    flops = console.format_flops(sum(run.flops for run in to_do))
    text = f"To do: {console.format_items(len(to_do), 'run')}, {flops} FLOPs"
    seconds = estimate.wall_seconds(to_do, workers)
    if seconds is not None and to_do:
        order = f"{workers} at a time" if workers > 1 else "one after another"
        text += f", about {console.format_duration(seconds)}, {order}"
    console.print_text(f"{text} (durations: {estimate.method}).")


def note_on_test_loops(planned: Sequence[PlannedRun], runs: Sequence[PlannedRun]) -> str | None:
    """A note if runs that existed before lack test loops of the larger grid."""
    existing = {run.name: set(run.recipe.validation_loops) for run in runs}
    lacking = {run.name: set(run.recipe.validation_loops) - existing[run.name] for run in planned}
    names = [name for name, loops in lacking.items() if loops]
    if not names:
        return None
    loops = ", ".join(map(str, sorted(set().union(*lacking.values()))))
    return (
        f"Test loops {loops} are measured in new runs only: {len(names)} existing runs, such as "
        f"{names[0]}, keep theirs. To measure all runs at the same, use another output folder."
    )


def note_on_budgets(runs: Sequence[PlannedRun]) -> str | None:
    """A note if rounding to whole steps misses budgets by more than 2 %."""
    off = {
        run.name: run.flops / run.budget - 1
        for run in runs
        if run.budget and abs(run.flops / run.budget - 1) > 0.02
    }
    if not off:
        return None
    name = max(off, key=lambda key: abs(off[key]))
    return (
        f"Steps are whole: {len(off)} of the runs miss their budget by more than 2 %, {name} by "
        f"{off[name]:+.1%}. Use larger budgets or a smaller data.global_batch."
    )


def note_on_depths(runs: Sequence[PlannedRun]) -> str | None:
    """A note if no FLOP budget has enough looped depths for a parabola."""
    depths: dict[tuple[str, float], set[float]] = {}
    for run in runs:
        if run.budget and run.mean_loops > 1:
            depths.setdefault((run.model, run.budget), set()).add(run.mean_loops)
    most = max(map(len, depths.values()), default=0)
    if not 1 < most < MIN_PARABOLA_POINTS:
        return None
    return (
        f"No budget has runs at {MIN_PARABOLA_POINTS} or more mean loops above 1, which the "
        f"parabolas of `parcae fit` need; the most is {most}. 1 is fixed depth, a baseline, and "
        "does not count."
    )


def note_on_repeated_data(runs: Sequence[PlannedRun], available: int) -> str | None:
    """A note if a run reads the data more than once."""
    longest = max(runs, key=lambda run: run.tokens)
    if longest.tokens <= available:
        return None
    return (
        f"The sources hold {console.format_count(available)} tokens: {longest.name} reads them "
        f"{longest.tokens / available:.2g} times."
    )
