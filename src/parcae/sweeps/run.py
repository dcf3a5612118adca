"""`parcae.sweep`: plan a grid of training runs, train them here or on Slurm, collect one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcae import console
from parcae.config import ConfigError
from parcae.files import check_links, lock_folder
from parcae.machine import StopSignals
from parcae.recipe import build, from_file, recipe_path
from parcae.runs import read_result
from parcae.sweeps.estimate import Estimate, estimate
from parcae.sweeps.folder import RunState, SweepFolder, training_tokens
from parcae.sweeps.grid import Grid, PlannedRun, plan_sweep
from parcae.sweeps.launch import (
    LocalWorkers,
    environments,
    threads_per_worker,
    visible_devices,
    worker_count,
)
from parcae.sweeps.progress import (
    SweepProgress,
    note_on_budgets,
    note_on_depths,
    note_on_repeated_data,
    note_on_test_loops,
    print_plan,
)
from parcae.sweeps.slurm import SlurmConfig, check_slurm, job_states, submit
from parcae.sweeps.worker import RunRequest
from parcae.tables import ShownAsTable
from parcae.training.settings import KINDS_OF_BUDGET, with_flags


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: what was planned, and what is known of it now."""

    name: str
    model: str
    mean_loops: float
    budget: float | None
    """Requested FLOPs; None where tokens or steps were given."""
    tokens: int
    steps: int
    flops: float
    parameters: int
    settings: Mapping[str, Any]
    """Its values of the settings that vary."""
    state: RunState
    folder: Path
    log: Path
    loss: float | None
    """Validation loss at `mean_loops`, in nats per token; None before the run has a result."""
    seconds: float | None
    """Training time; None before the run has a result."""
    failure: str | None
    """Why it failed or diverged."""


@dataclass(frozen=True)
class SweepResult(ShownAsTable):
    """The runs of a sweep and its table so far."""

    folder: Path
    runs: tuple[SweepRun, ...]
    table_file: Path
    """runs.csv; absent until a run has finished."""
    rows: tuple[Mapping[str, Any], ...]
    interrupted: bool = False
    """Whether Ctrl-C or SIGTERM stopped it; the same call continues it."""

    def table(self) -> list[dict[str, Any]]:
        """One dict per finished run and number of test loops; `parcae.fit` takes this list."""
        return [dict(row) for row in self.rows]


def sweep(
    recipe: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    flops: Iterable[float] = (),
    tokens: Iterable[float] = (),
    mean_loops: Iterable[float] = (),
    models: Iterable[str] = (),
    learning_rates: Iterable[float] = (),
    seeds: Iterable[int] = (),
    settings: Mapping[str, Iterable[Any]] | None = None,
    test_loops: Iterable[int] = (),
    overrides: Mapping[str, Any] | None = None,
    workers: int | None = None,
    slurm: SlurmConfig | Mapping[str, Any] | None = None,
    retry: bool = False,
    dry_run: bool = False,
    utilisation: float | None = None,
    device_flops: str | float | None = None,
    follow_links: bool = False,
    verbose: bool = True,
) -> SweepResult:
    """Train one run for each point of a grid, and collect the losses in one table.

    Each run trains in a process of its own. The same call again continues what was interrupted and
    skips finished runs; a larger grid with the same `out` adds runs.

        result = parcae.sweep(
            "recipes/sweep.toml", "runs/laws", flops=[6e11, 1.2e12], mean_loops=[1, 2, 4]
        )
        laws = parcae.fit(result.table())

    Args:
        recipe: A recipe file, the name of a recipe that comes with parcae, or its tables as a dict;
            or the folder of a sweep, to continue it.
        out: Folder of the sweep. Default: runs/NAME-sweep for a recipe NAME.toml.
        flops: Training FLOPs of a run.
        tokens: Training tokens of a run, instead of `flops`.
        mean_loops: Mean loops in training; 1 is fixed depth.
        models: Presets to use instead of the recipe's.
        learning_rates: Learning rates of AdamW; Muon's keeps its ratio to it.
        seeds: Seeds of initialisation and data order.
        settings: Values of any other setting by its key: `{"optimiser.beta2": [0.9, 0.95]}`.
        test_loops: Loops at which every run is validated. Default: 1, all of `mean_loops`, and 1.5
            and 2 times the largest.
        overrides: Settings of all runs to change: `{"data": {"global_batch": 16}}`.
        workers: Runs that train at the same time. Default: the number of GPUs, or 1.
        slurm: Submit the runs to Slurm and return: a `SlurmConfig`, or its fields as a dict.
        retry: Also start runs that failed before.
        dry_run: Only plan: train nothing and write nothing.
        utilisation: Fraction of the device's peak speed to assume for estimates of time. Default:
            steps of small models are measured; 0.4 for others.
        device_flops: Peak speed of one device for estimates: FLOP/s, or a name such as h100.
        follow_links: Write through symbolic links that lead out of the folder of the sweep or of a
            run. Default: such links are refused.
        verbose: Print the plan and the progress.

    Returns:
        The runs with their states, and the table of the finished ones.
    """
    grid = Grid(
        flops=tuple(flops),
        tokens=tuple(tokens),
        mean_loops=tuple(mean_loops),
        models=tuple(models),
        learning_rates=tuple(learning_rates),
        seeds=tuple(seeds),
        settings={key: tuple(values) for key, values in (settings or {}).items()},
        test_loops=tuple(test_loops),
    )
    cluster = _slurm_config(slurm, workers, dry_run)
    folder, planned = _plan(recipe, out, grid, overrides or {})
    folder.follow_links = follow_links
    runner = _Runner(
        folder=folder,
        runs=folder.read_plan() if planned is None else folder.extended(planned),
        workers=worker_count(workers),
        retry=retry,
        utilisation=utilisation,
        device_flops=device_flops,
        verbose=verbose,
    )
    if planned is not None:
        runner.message(note_on_test_loops(planned, runner.runs))
    if dry_run:
        runner.show_plan()
        return runner.result()
    check_links(folder.path, follow_links=follow_links)
    with lock_folder(folder.path):
        if planned is not None:
            runner.runs = folder.extended(planned)  # another process may have extended it
        folder.write_plan(runner.runs)
        interrupted = False
        if cluster is None:
            interrupted = runner.train()
        else:
            runner.submit(cluster)
        folder.collect(runner.runs)
        return runner.result(interrupted)


@dataclass
class _Runner:
    folder: SweepFolder
    runs: tuple[PlannedRun, ...]
    workers: int
    retry: bool
    utilisation: float | None
    device_flops: str | float | None
    verbose: bool

    def message(self, text: str | None) -> None:
        if self.verbose and text is not None:
            console.print_text(text)

    def states(self) -> dict[str, RunState]:
        return self.folder.states(self.runs, job_states)

    def to_do(self, states: Mapping[str, RunState]) -> list[PlannedRun]:
        """The runs to start, given the states of all runs.

        One that is `running` without a job belongs to a sweep that was killed: it is about to stop,
        and its worker waits for that.
        """
        jobs = self.folder.read_jobs()
        startable = ("to do", "stopped", "failed") if self.retry else ("to do", "stopped")
        return [
            run
            for run in self.runs
            if states[run.name] in startable
            or (states[run.name] == "running" and run.name not in jobs)
        ]

    def estimate(self, to_do: Sequence[PlannedRun]) -> Estimate:
        threads = threads_per_worker(self.workers)
        return estimate(to_do, threads, self.utilisation, self.device_flops)

    def show_plan(self) -> None:
        states = self.states()
        to_do = self.to_do(states)
        self._print_plan(states, to_do, self.estimate(to_do))

    def _print_plan(
        self, states: Mapping[str, RunState], to_do: Sequence[PlannedRun], estimated: Estimate
    ) -> None:
        if self.verbose:
            print_plan(self.runs, states, to_do, estimated, self.workers, self.folder.path)
        self.message(note_on_budgets(self.runs))
        self.message(note_on_depths(self.runs))

    def prepare(self) -> None:
        available = training_tokens(self.folder.prepare(self.runs, self.message))
        self.message(note_on_repeated_data(self.runs, available))

    def train(self) -> bool:
        """Train the runs that are left in local processes; True if a signal stopped it."""
        states = self.states()
        to_do = self.to_do(states)
        if not to_do:
            return False
        estimated = self.estimate(to_do)
        self._print_plan(states, to_do, estimated)
        self.prepare()
        requests = {run.name: self.folder.request(run.name) for run in to_do}
        display = SweepProgress(
            requests,
            steps={run.name: run.steps for run in to_do},
            weights=estimated.seconds or {run.name: run.flops for run in to_do},
            expected=estimated.wall_seconds(to_do, self.workers),
            shown=self.verbose,
        )
        pool = LocalWorkers(self.workers, environments(self.workers, visible_devices()))
        with display, StopSignals() as stop:
            pool.run(list(requests.values()), _Recorder(self.folder, self.runs, display), stop)
            return stop.asked

    def submit(self, config: SlurmConfig) -> None:
        """Submit the runs that are left to Slurm."""
        to_do = self.to_do(self.states())
        if to_do:
            self.prepare()
        for run in to_do:
            job = submit(self.folder.request(run.name), config, self.folder.path / "slurm")
            self.folder.record_start(run.name, job)
            self.message(f"job {job}  {run.name}")

    def result(self, interrupted: bool = False) -> SweepResult:
        states, failures = self.states(), self.folder.read_failures()
        return SweepResult(
            folder=self.folder.path,
            runs=tuple(
                _described(self.folder, run, states[run.name], failures.get(run.name))
                for run in self.runs
            ),
            table_file=self.folder.table_file,
            rows=tuple(self.folder.rows(self.runs)),
            interrupted=interrupted,
        )


@dataclass
class _Recorder:
    """Keeps failed.json and the table up to date while runs end, and passes events on."""

    folder: SweepFolder
    runs: Sequence[PlannedRun]
    display: SweepProgress

    def started(self, request: RunRequest, attempt: int) -> None:
        self.folder.record_start(request.name)
        self.display.started(request, attempt)

    def ended(self, request: RunRequest, failure: str | None) -> None:
        if failure is not None:
            self.folder.record_failure(request.name, failure)
        self.folder.collect(self.runs)
        self.display.ended(request, failure)

    def waiting(self) -> None:
        self.display.waiting()


def _described(
    folder: SweepFolder, run: PlannedRun, state: RunState, failure: str | None
) -> SweepRun:
    result = read_result(folder.run_folder(run.name))
    nominal = run.recipe.model.loop.nominal_loops
    if state in ("failed", "diverged"):
        failure = failure or "its job ended without a result."
    else:
        failure = None
    return SweepRun(
        name=run.name,
        model=run.model,
        mean_loops=run.mean_loops,
        budget=run.budget,
        tokens=run.tokens,
        steps=run.steps,
        flops=run.flops,
        parameters=run.parameters,
        settings=run.settings,
        state=state,
        folder=folder.run_folder(run.name),
        log=folder.log_file(run.name),
        loss=None if result is None else result.losses.get(nominal),
        seconds=None if result is None else result.seconds,
        failure=failure,
    )


def _plan(
    recipe: str | Path | Mapping[str, Any],
    out: str | Path | None,
    grid: Grid,
    overrides: Mapping[str, Any],
) -> tuple[SweepFolder, tuple[PlannedRun, ...] | None]:
    """The folder, and the runs of the grid; None for these if an existing sweep is continued."""
    if not isinstance(recipe, Mapping):
        recipe = Path(recipe)
        if recipe.is_dir():
            _check_continues(recipe, out, grid, overrides)
            return SweepFolder(recipe), None
        recipe = recipe_path(recipe)
        if not recipe.exists():
            raise ConfigError(f"{recipe}: no such file. Give a recipe, or the folder of a sweep.")
    if grid.is_empty:
        raise ConfigError(
            "sweep: nothing varies. Give flops or tokens, mean_loops, models, learning_rates, "
            "seeds, or values of a setting (`grid`)."
        )
    kinds = (kind for kind in KINDS_OF_BUDGET if kind in overrides.get("budget", {}))
    if (kind := next(kinds, None)) is not None and (grid.flops or grid.tokens):
        given = "flops" if grid.flops else "tokens"
        raise ConfigError(f"budget.{kind}: {given} already set the length of runs. Omit one.")
    if isinstance(recipe, Mapping):
        if out is None:
            raise ConfigError(
                "out: a recipe without a file needs a folder. Pass `out`, the folder of the sweep."
            )
        return SweepFolder(Path(out)), plan_sweep(with_flags(recipe, overrides), grid)
    planned = from_file(recipe, dict(overrides), lambda *both: plan_sweep(with_flags(*both), grid))
    return SweepFolder(Path(out or Path("runs") / f"{recipe.stem}-sweep")), planned


def _check_continues(
    folder: Path, out: str | Path | None, grid: Grid, overrides: Mapping[str, Any]
) -> None:
    if out is not None:
        raise ConfigError(
            f"out: {folder} is the sweep's folder already. Omit it, or give a recipe."
        )
    if overrides or not grid.is_empty or grid.test_loops:
        raise ConfigError(
            f"{folder}: a sweep is continued by its own plan. To add runs to it, give the recipe, "
            f"the grid and `out`, {folder}."
        )


def _slurm_config(
    slurm: SlurmConfig | Mapping[str, Any] | None, workers: int | None, dry_run: bool
) -> SlurmConfig | None:
    if slurm is None:
        return None
    if workers is not None:
        raise ConfigError("workers: Slurm decides how many runs train at the same time. Omit it.")
    config = slurm if isinstance(slurm, SlurmConfig) else build(SlurmConfig, slurm)
    if not dry_run:
        check_slurm()
    return config
