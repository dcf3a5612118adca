"""`parcae fit`: fit all scaling laws to a table of runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from parcae.laws import DEFAULT_BOOTSTRAP_SAMPLES, DEFAULT_STARTS

if TYPE_CHECKING:
    from parcae.laws.fit import FitResult
    from parcae.laws.table import Table


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "fit",
        help="fit scaling laws to a table of runs, with intervals and figures",
        epilog="The table needs the columns model, mean_loops, tokens, flops, effective_params, "
        "test_loops and loss; docs/scaling-laws.md describes them. From Python: parcae.fit.",
    )
    parser.add_argument(
        "table",
        metavar="TABLE",
        type=Path,
        help="table of runs, a .csv or .parquet file, or the folder of a sweep",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the results (default: out/fit; for a sweep, fit in its folder)",
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=DEFAULT_STARTS,
        metavar="N",
        help="random starts of each law; unified laws use twice as many (default: %(default)s)",
    )
    parser.add_argument(
        "--bootstrap-samples",
        type=int,
        default=DEFAULT_BOOTSTRAP_SAMPLES,
        metavar="N",
        help="bootstrap samples for the intervals, 0 for no intervals (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of starts and bootstrap samples (default: %(default)s)",
    )
    parser.add_argument(
        "--best-of",
        action="append",
        metavar="COLUMN",
        help="where runs of the same loops and FLOPs differ in this column, fit to the best of "
        "them; may be repeated, `none` fits to all (default: every setting that differs)",
    )
    parser.add_argument(
        "--no-halving",
        action="store_true",
        help="follow every start to convergence instead of dropping the worse ones early; slower "
        "(default: off)",
    )
    parser.add_argument(
        "--no-figures", action="store_true", help="write no figures and no page (default: off)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import parcae
    from parcae.files import check_links, lock_folder
    from parcae.laws.fit import SWEEP_FOLDER
    from parcae.laws.table import as_table

    table = as_table(arguments.table)
    in_sweep = arguments.table / SWEEP_FOLDER if arguments.table.is_dir() else Path("out/fit")
    out = arguments.out or in_sweep
    if arguments.out is None and arguments.table.is_dir():
        check_links(arguments.table, [SWEEP_FOLDER], arguments.follow_links)
    with lock_folder(out), _progress_bar(table) as progress:
        result = parcae.fit(
            table,
            starts=arguments.starts,
            bootstrap_samples=arguments.bootstrap_samples,
            halving=not arguments.no_halving,
            seed=arguments.seed,
            best_of=[] if arguments.best_of == ["none"] else arguments.best_of,
            progress=progress,
        )
        files = result.save(out, figures=not arguments.no_figures, progress=progress)
    _print(result, f"wrote {', '.join(files)} to {out}")
    return 0


@contextmanager
def _progress_bar(table: Table) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal, advanced by the description of each step."""
    from parcae import console
    from parcae.laws.fit import STEPS_PER_MODEL, looped_models

    with console.progress() as display:
        total = STEPS_PER_MODEL * len(looped_models(table)) + 1
        task = display.add_task("reading", total=total)
        display.advance(task, -1)  # the first description starts the first step
        yield lambda text: display.update(task, description=text, advance=1)


def _print(result: FitResult, last_line: str) -> None:
    from parcae import console
    from parcae.laws.summary import notes, summary_tables

    for table in summary_tables(result):
        console.out.print(console.table(table.title, table.columns, table.rows))
    for model, lines in notes(result).items():
        for line in lines:
            text = line if line.startswith(f"{model}:") else f"{model}: {line}"
            console.print_text(text, style="yellow")
    console.print_text(last_line)
