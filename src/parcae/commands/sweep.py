"""`parcae sweep`: plan a grid of runs, run it here or on a cluster, gather one table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.sweeps.estimate import Estimate
    from parcae.sweeps.folder import SweepFolder
    from parcae.sweeps.plan import Grid, PlannedRun
    from parcae.sweeps.slurm import SlurmConfig

EPILOG = (
    "Settings may be changed for all runs with --table.key VALUE, e.g. --data.global_batch 16. "
    "Of a cluster's jobs: --slurm.partition, .account, .qos, .constraint, .minutes, .gpus, .cpus, "
    ".memory, .jobs_at_limit. docs/scaling-laws.md says more."
)


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "sweep", help="train a grid of runs: FLOP budgets by loops, and more", epilog=EPILOG
    )
    parser.add_argument(
        "source", metavar="RECIPE.toml|FOLDER", help="a recipe, or a sweep to go on with"
    )
    add = parser.add_argument
    add("--budgets", metavar="FLOPS,...", help="train each model with so many FLOPs")
    add("--tokens", metavar="N,...", help="or with so many tokens")
    add("--loops", metavar="N,...", help="mean loops in training; 1 is fixed depth")
    add("--models", metavar="PRESET,...", help="presets in the place of the recipe's")
    add("--learning-rates", metavar="LR,...", help="AdamW's; Muon's keeps its ratio to it")
    add("--seeds", metavar="N,...")
    add("--grid", action="append", default=[], metavar="TABLE.KEY=V,...", help="any other setting")
    add("--test-loops", metavar="T,...", help="loops to validate every run at")
    add("--out", type=Path, metavar="FOLDER", help="(default: runs/<recipe's name>-sweep)")
    add("--workers", type=int, metavar="N", help="runs side by side (default: GPUs, or 1)")
    add("--slurm", action="store_true", help="send the runs to Slurm")
    add("--retry", action="store_true", help="try runs that have failed again")
    add(
        "--dry-run", action="store_true", help="show the plan and what is done of it; write nothing"
    )
    add("--utilisation", type=float, metavar="SHARE", help="of the device's best speed, for ETAs")
    add("--device-flops", metavar="FLOPS|NAME", help="of one device, for ETAs: 312e12, a100, h100")
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae.commands.sweeping import show_plan, show_states
    from parcae.recipe import parse_flags
    from parcae.sweeps.folder import SweepFolder

    flags = parse_flags(arguments.settings)
    slurm = _slurm(arguments, flags.pop("slurm", None))
    source = Path(arguments.source)
    folder = SweepFolder(_folder(arguments, source))
    runs = _planned(arguments, flags, folder, source)
    workers = _workers(arguments)
    if arguments.dry_run:
        show_plan(runs, folder, _estimate(arguments, runs, folder, workers), workers)
        return 0

    from parcae.files import exclusive

    with exclusive(folder.path):
        if not source.is_dir():
            runs = folder.extended(runs)  # again: another may have grown it meanwhile
        folder.write_plan(runs)
        stopped = (
            _send(arguments, runs, folder, slurm)
            if slurm is not None
            else _work(arguments, runs, folder, workers)
        )
        folder.collect(runs)
        failed = show_states(runs, folder)
    return 130 if stopped else int(failed > 0)


def _folder(arguments: argparse.Namespace, source: Path) -> Path:
    from parcae.config import require

    if source.is_dir():
        remedy = "Leave --out away, or name a recipe."
        require(arguments.out is None, "--out", f"{source} is the sweep's folder already", remedy)
        return source
    return arguments.out or Path("runs") / f"{source.stem}-sweep"


def _planned(
    arguments: argparse.Namespace, flags: dict[str, Any], folder: SweepFolder, source: Path
) -> tuple[PlannedRun, ...]:
    from parcae.commands.sweeping import tell_kept_depths
    from parcae.config import ConfigError
    from parcae.recipe import from_file
    from parcae.sweeps.plan import plan_sweep
    from parcae.training.settings import KINDS_OF_BUDGET, with_flags

    grid = _grid(arguments)
    if source.is_dir():
        if flags or grid is not None:
            raise ConfigError(
                f"{source}: a sweep's folder goes on with its own plan. To add runs to it, give "
                f"the recipe, the grid and --out {source}."
            )
        return folder.read_plan()
    if not source.exists():
        raise ConfigError(f"{source}: no such file. Give a recipe, or the folder of a sweep.")
    if grid is None:
        raise ConfigError(
            "sweep: nothing varies. Give --budgets or --tokens and --loops, or --learning-rates, "
            "--seeds, --models, or --grid table.key=1,2."
        )
    budget = next((kind for kind in KINDS_OF_BUDGET if kind in flags.get("budget", {})), None)
    if budget is not None and (grid.flops or grid.tokens):
        given = "--budgets" if grid.flops else "--tokens"
        raise ConfigError(f"--budget.{budget}: {given} says how long runs are. Leave one away.")
    planned = from_file(source, flags, lambda *both: plan_sweep(with_flags(*both), grid))
    runs = folder.extended(planned)
    tell_kept_depths(planned, runs)
    return runs


def _grid(arguments: argparse.Namespace) -> Grid | None:
    from parcae.commands.sweeping import grid_settings, numbers, words
    from parcae.sweeps.plan import Grid

    given = {
        "flops": numbers("--budgets", arguments.budgets),
        "tokens": numbers("--tokens", arguments.tokens),
        "loops": numbers("--loops", arguments.loops),
        "models": words(arguments.models),
        "learning_rates": numbers("--learning-rates", arguments.learning_rates),
        "seeds": numbers("--seeds", arguments.seeds, whole=True),
        "settings": grid_settings(arguments.grid),
    }
    if not any(given.values()):
        return None
    test_loops = numbers("--test-loops", arguments.test_loops, whole=True)
    return Grid(**given, test_loops=test_loops)  # pyright: ignore[reportArgumentType]


def _slurm(arguments: argparse.Namespace, table: Any) -> SlurmConfig | None:
    from parcae.config import ConfigError
    from parcae.recipe import build
    from parcae.sweeps.slurm import SlurmConfig, check_slurm

    if not arguments.slurm and table is None:
        return None
    if arguments.workers is not None:
        raise ConfigError("--workers: Slurm decides how many run at once. Leave it away.")
    config = build(SlurmConfig, table or {})
    if not arguments.dry_run:
        check_slurm()
    return config


def _workers(arguments: argparse.Namespace) -> int:
    import torch

    from parcae.config import require

    if arguments.workers is None:
        return max(1, torch.cuda.device_count())
    fits = arguments.workers >= 1
    require(fits, "--workers", f"{arguments.workers} is not positive", "Use at least 1.")
    return arguments.workers


def _estimate(
    arguments: argparse.Namespace, runs: tuple[PlannedRun, ...], folder: SweepFolder, workers: int
) -> Estimate:
    from parcae.commands.plan import device_speed
    from parcae.sweeps.estimate import estimate
    from parcae.sweeps.launch import threads_of
    from parcae.sweeps.run_state import outcome_of

    left = [run for run in runs if not outcome_of(folder.run(run.name)).is_final]
    speed = device_speed(arguments.device_flops)
    return estimate(left, threads_of(workers), arguments.utilisation, speed)


def _work(
    arguments: argparse.Namespace, runs: tuple[PlannedRun, ...], folder: SweepFolder, workers: int
) -> bool:
    """Whether it was asked to stop."""
    from parcae.commands.sweeping import prepare, show_plan, to_do
    from parcae.sweeps.launch import LocalWorkers, environments, visible_devices
    from parcae.sweeps.progress import Watch
    from parcae.training.stop import StopSignals

    waiting = to_do(runs, folder, arguments.retry)
    if not waiting:
        return False
    guess = _estimate(arguments, tuple(waiting), folder, workers)
    show_plan(runs, folder, guess, workers)
    prepare(runs, folder)
    weights = guess.seconds or {run.name: run.flops for run in waiting}
    watch = Watch(folder, runs, waiting, weights, guess.wall(waiting, workers))
    pool = LocalWorkers(workers, environments(workers, visible_devices()))
    with watch, StopSignals() as stop:
        pool.run([folder.job(run.name) for run in waiting], watch, stop)
        return stop.asked


def _send(
    arguments: argparse.Namespace,
    runs: tuple[PlannedRun, ...],
    folder: SweepFolder,
    config: SlurmConfig,
) -> bool:
    from parcae.commands.sweeping import prepare, say, to_do
    from parcae.sweeps.slurm import submit

    waiting = to_do(runs, folder, arguments.retry)
    if waiting:
        prepare(runs, folder)
    for run in waiting:
        number = submit(folder.job(run.name), config, folder.path / "slurm")
        folder.begin(run.name, job=number)
        say(f"job {number}  {run.name}")
    return False
