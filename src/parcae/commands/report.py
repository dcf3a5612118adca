"""`parcae report`: one HTML page about one run, or several compared."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "report", help="write a self-contained HTML page about one run, or several compared"
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for report.html and its figures (default: RUN/report; out/report for several)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.report.page import write_report

    console.print_text(f"wrote {write_report(arguments.runs, arguments.out)}")
    return 0
