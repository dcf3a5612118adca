"""`parcae report`: one HTML page and one table of any number of runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "report", help="write a self-contained HTML page about any number of runs, or a sweep"
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a run or a sweep"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for report.html, its figures as PNG and the table of runs as Markdown, CSV "
        "and LaTeX (default: RUN/report; out/report for several)",
    )
    parser.add_argument(
        "--axis",
        choices=("step", "tokens", "flops"),
        default="step",
        help="what the figures over training have along x at first, and in the PNG files "
        "(default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.report.page import write_report

    path = write_report(
        arguments.runs, arguments.out, axis=arguments.axis, follow_links=arguments.follow_links
    )
    console.print_text(f"wrote {path}")
    return 0
