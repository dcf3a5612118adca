"""`parcae demo`: see in two minutes what looping does."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("demo", help="train a tiny looped model and draw what loops do")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the picture")
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps (default 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae.config import require
    from parcae.experiments.first_look import first_look

    require(
        arguments.steps >= 1, "--steps", f"{arguments.steps} is not positive", "Use at least 1."
    )
    first_look(arguments.out, arguments.steps, arguments.seed)
    return 0
