"""`parcae report`: one page about one run, or several compared."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "report", help="write a self-contained page about one run, or several compared"
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the page (default: RUN/report, or out/report for several runs)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.report.page import write_report
    from parcae.report.runs import read_runs
    from parcae.runs.layout import REPORT_FOLDER

    runs = read_runs(arguments.runs)
    several = Path("out/report")
    out = arguments.out or (arguments.runs[0] / REPORT_FOLDER if len(runs) == 1 else several)
    path = write_report(runs, out)
    console.out.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 0
