"""`parcae reproduce`: the tables and figures of the paper, from training to a page of verdicts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

EPILOG = (
    "Settings of all recipes may be changed with --table.key VALUE, except those that an "
    "experiment sets itself; only runs that depend on one are trained again. Slurm jobs: "
    "--slurm.partition, .minutes, .gpus, ... as in `parcae sweep`."
)


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "reproduce", help="reproduce tables and figures of the paper", epilog=EPILOG
    )
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="list|all|NAME",
        help="`list` for the names and costs of the experiments, `all`, or some of the names",
    )
    add(
        "--scale",
        choices=("micro", "paper", "toy"),
        default="micro",
        help="sizes: micro (one machine), paper (a cluster), toy (a test) (default: micro)",
    )
    add("--seeds", type=int, default=3, metavar="N", help="runs of each kind (default: 3)")
    add(
        "--select",
        action="append",
        default=[],
        metavar="LABEL=VALUE",
        help="train only runs with this label, such as lr=0.064; may be repeated (default: all)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="train nothing; print runs, FLOPs and hours (default: train what is missing)",
    )
    add(
        "--redraw",
        action="store_true",
        help="train nothing; judge and draw the results (default: train what is missing)",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of runs and data (default: runs/reproduction-SCALE)",
    )
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="folder of the measurements, one file an experiment (default: OUT/results)",
    )
    add(
        "--page",
        type=Path,
        metavar="FILE.md",
        help="the page to write; its figures go to a folder of its name (default: "
        "OUT/reproduction.md)",
    )
    add(
        "--texts",
        metavar="FOLDER",
        help="folder of the corpora, or `builtin` to train on Python's standard library (default: "
        "PARCAE_TEST_DATA/data/corpora)",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="runs that train at the same time (default: 1)",
    )
    add("--slurm", action="store_true", help="submit to Slurm (default: train here)")
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.experiments.reproduce import CATALOGUE, costs, reproduce
    from parcae.recipe import parse_flags

    overrides = parse_flags(arguments.settings)
    slurm = overrides.pop("slurm", {} if arguments.slurm else None)
    select = parse_flags([f"--select.{label}" for label in arguments.select]).get("select")
    is_list = arguments.names == ["list"]
    names = "all" if is_list else arguments.names
    what: dict[str, Any] = {
        "scale": arguments.scale,
        "seeds": arguments.seeds,
        "overrides": overrides,
        "texts": arguments.texts,
        "select": select,
    }
    if is_list or arguments.dry_run:
        _print_costs(costs(names, **what), arguments.scale)
        return 0
    result = reproduce(
        names,
        **what,
        out=arguments.out,
        results=arguments.results,
        page=arguments.page,
        workers=arguments.workers,
        slurm=slurm,
        redraw=arguments.redraw,
        follow_links=arguments.follow_links,
    )
    for name, results in result.results.items():
        columns, cells = CATALOGUE[name].table(results)
        if results.rows and cells:
            console.out.print(console.table(CATALOGUE[name].title, columns, cells))
    rows = [
        (row["experiment"], row["claim"], row["verdict"], f"{row['runs']}/{row['planned_runs']}")
        for row in result.table()
    ]
    console.out.print(console.table("Claims", ("experiment", "claim", "verdict", "runs"), rows))
    console.print_text(f"Page: {result.page}")
    return 130 if result.interrupted else int(bool(result.failures))


def _print_costs(rows: list[dict[str, Any]], scale: str) -> None:
    from parcae import console
    from parcae.experiments.reproduce import CORE_FLOPS
    from parcae.training.plan import DEFAULT_GPU, UTILISATION

    numbers = ("runs", "flops", "core_hours", "gpu_hours")
    total = {name: sum(row[name] for row in rows) for name in numbers}
    cells = [
        (
            row["experiment"],
            row["title"],
            row["in_paper"],
            row["runs"],
            console.format_flops(row["flops"]) if row["flops"] else "–",
            *(_hours(row[name]) for name in numbers[2:]),
        )
        for row in (*rows, {"experiment": "total", "title": "", "in_paper": "", **total})
    ]
    columns = ("experiment", "what", "in the paper", "runs", "FLOPs")
    columns = (*columns, "core-hours", f"{DEFAULT_GPU}-hours")
    console.out.print(console.table(f"Experiments, {scale} scale", columns, cells))
    console.print_text(
        f"Runs that several experiments share count once. Hours are estimated: a core computes "
        f"{CORE_FLOPS:.2g} FLOP/s, a GPU {UTILISATION:.0%} of its peak."
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}" if hours else "–"
