"""`parcae reproduce`: the tables and figures of the paper, from training to a page of verdicts."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = (
    "Settings of all recipes may be changed with --table.key VALUE; only runs that depend on one "
    "are trained again. Slurm jobs: --slurm.partition, .minutes, .gpus, ... as in `parcae sweep`."
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
        type=Path,
        metavar="FOLDER",
        help="folder of the corpora (default: PARCAE_TEST_DATA/data/corpora)",
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
    from parcae.experiments.reproduce import CATALOGUE, reproduce
    from parcae.recipe import parse_flags

    if arguments.names == ["list"]:
        rows = [
            (
                name,
                experiment.title,
                experiment.in_paper,
                f"{experiment.core_hours:g}" if experiment.core_hours else "shared",
            )
            for name, experiment in CATALOGUE.items()
        ]
        columns = ("experiment", "what", "in the paper", "core-hours (micro)")
        console.out.print(console.table("Experiments", columns, rows))
        return 0
    overrides = parse_flags(arguments.settings)
    slurm = overrides.pop("slurm", {} if arguments.slurm else None)
    result = reproduce(
        arguments.names,
        scale=arguments.scale,
        seeds=arguments.seeds,
        overrides=overrides,
        out=arguments.out,
        results=arguments.results,
        page=arguments.page,
        texts=arguments.texts,
        workers=arguments.workers,
        slurm=slurm,
        redraw=arguments.redraw,
    )
    rows = [
        (row["experiment"], row["claim"], row["verdict"], f"{row['runs']}/{row['planned_runs']}")
        for row in result.table()
    ]
    console.out.print(console.table("Claims", ("experiment", "claim", "verdict", "runs"), rows))
    console.print_text(f"Page: {result.page}")
    return 130 if result.interrupted else int(bool(result.failures))
