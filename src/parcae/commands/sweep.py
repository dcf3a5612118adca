"""`parcae sweep`: train a grid of runs here or on a cluster, and collect one table."""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcae.console import parse_int_list, parse_list, parse_number_list

if TYPE_CHECKING:
    from parcae.sweeps.run import SweepResult

EPILOG = (
    "Settings of all runs may be changed with --table.key VALUE, e.g. --data.global_batch 16. "
    "Slurm jobs: --slurm.partition, .account, .qos, .constraint, .minutes, .gpus, .cpus, .memory, "
    ".jobs_at_limit. See docs/scaling-laws.md."
)


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "sweep", help="train a grid of runs: FLOP budgets by loops, and more", epilog=EPILOG
    )
    parser.add_argument(
        "source",
        metavar="RECIPE.toml|FOLDER",
        help="a recipe file, the name of one that comes with parcae, or the folder of a sweep to "
        "continue",
    )
    grid = parser.add_argument_group(
        "grid", "lists separated by commas; one run per combination; default: the recipe's value"
    )
    numbers = {"type": parse_number_list, "default": ()}
    integers = {"type": parse_int_list, "default": ()}
    grid.add_argument("--flops", metavar="FLOPS,...", help="training FLOPs of a run", **numbers)
    grid.add_argument(
        "--tokens",
        metavar="N,...",
        help="training tokens, instead of --flops",
        **numbers,
    )
    grid.add_argument(
        "--mean-loops", metavar="N,...", help="mean loops in training; 1 is fixed depth", **numbers
    )
    grid.add_argument(
        "--models",
        type=parse_list,
        default=(),
        metavar="PRESET,...",
        help="presets to use instead of the recipe's",
    )
    grid.add_argument(
        "--learning-rates",
        metavar="LR,...",
        help="AdamW learning rates; optimiser.muon_lr is scaled by the same factor",
        **numbers,
    )
    grid.add_argument(
        "--seeds", metavar="N,...", help="seeds of initialisation and data order", **integers
    )
    grid.add_argument(
        "--grid",
        type=parse_setting,
        action="append",
        metavar="TABLE.KEY=V,...",
        help="values of any other setting; may be repeated",
    )
    grid.add_argument(
        "--test-loops",
        metavar="T,...",
        help="loops at which every run is validated (default: 1, all --mean-loops, and 1.5 and 2 "
        "times the largest)",
        **integers,
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER", help="default: runs/<name of the recipe>-sweep")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="runs that train at the same time (default: the number of GPUs, or 1)",
    )
    add("--slurm", action="store_true", help="submit the runs to Slurm instead of training here")
    add("--retry", action="store_true", help="also start runs that failed before")
    add("--dry-run", action="store_true", help="print the plan and its state; write nothing")
    add(
        "--utilisation",
        type=float,
        metavar="FRACTION",
        help="fraction of the device's peak speed to assume for estimates of time (default: "
        "steps of small models are measured, 0.4 for others)",
    )
    add(
        "--device-flops",
        metavar="FLOPS|NAME",
        help="peak speed of one device for estimates of time: FLOP/s such as 312e12, or a100, h100 "
        "(default: that of the recipe's device)",
    )
    parser.set_defaults(run=run, takes_settings=True)


def parse_setting(text: str) -> tuple[str, list[Any]]:
    """`optimiser.beta2=0.9,0.95` -> ("optimiser.beta2", [0.9, 0.95])."""
    key, equals, values = text.partition("=")
    if not equals or "." not in key or not values:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a setting with values. Write table.key=1,2."
        )
    return key.lstrip("-").replace("-", "_"), [_value(part) for part in parse_list(values)]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def run(arguments: argparse.Namespace) -> int:
    from parcae.commands.plan import device_speed
    from parcae.recipe import parse_flags
    from parcae.sweeps.run import sweep

    overrides = parse_flags(arguments.settings)
    slurm = overrides.pop("slurm", {} if arguments.slurm else None)
    result = sweep(
        arguments.source,
        arguments.out,
        flops=arguments.flops,
        tokens=arguments.tokens,
        mean_loops=arguments.mean_loops,
        models=arguments.models,
        learning_rates=arguments.learning_rates,
        seeds=arguments.seeds,
        settings=dict(arguments.grid or ()),
        test_loops=arguments.test_loops,
        overrides=overrides,
        workers=arguments.workers,
        slurm=slurm,
        retry=arguments.retry,
        dry_run=arguments.dry_run,
        utilisation=arguments.utilisation,
        device_flops=device_speed(arguments.device_flops),
        follow_links=arguments.follow_links,
    )
    if arguments.dry_run:
        return 0
    _print_result(result)
    if result.interrupted:
        return 130
    return int(any(run.failure is not None for run in result.runs))


def _print_result(result: SweepResult) -> None:
    from parcae import console
    from parcae.registry import import_options, imported_files

    rows = [
        (
            run.name,
            run.state,
            "" if run.loss is None else f"{run.loss:.4f}",
            console.format_count(run.tokens),
            console.format_flops(run.flops),
            "" if run.seconds is None else console.format_duration(run.seconds),
        )
        for run in result.runs
    ]
    columns = ("run", "state", "loss at mean loops", "tokens", "FLOPs", "time")
    console.out.print(console.table(str(result.folder), columns, rows))
    command = f"parcae sweep {result.folder}{import_options(imported_files())}"
    for run in result.runs:
        if run.failure is not None:
            console.print_text(f"{run.state}: {run.name}: {run.failure} See {run.log}")
    if any(run.state == "failed" for run in result.runs):
        console.print_text(f"To start failed runs again: {command} --retry")
    counts = Counter(run.state for run in result.runs)
    console.print_text(", ".join(f"{count} {state}" for state, count in counts.items()) + ".")
    if result.interrupted:
        console.print_text(f"To continue: {command}")
    if result.rows:
        console.print_text(f"Table: {result.table_file}  Laws: parcae fit {result.folder}")
