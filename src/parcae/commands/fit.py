"""`parcae fit`: every scaling law from a table of runs, with figures and a summary."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parcae.laws.analysis import Step, Study
    from parcae.laws.table import Table


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "fit",
        help="fit the scaling laws to a table of runs: parameters, intervals, figures",
        epilog="The table has the columns model, mean_loops, tokens, flops, effective_params, "
        "test_loops, loss; others are kept. docs/scaling-laws.md says more.",
    )
    parser.add_argument(
        "table", metavar="TABLE", type=Path, help=".csv or .parquet, or a sweep's folder"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="(out/fit; of a sweep, fit in its folder)"
    )
    parser.add_argument(
        "--starts", type=int, default=500, metavar="N", help="random starts (%(default)s)"
    )
    parser.add_argument(
        "--draws", type=int, default=200, metavar="N", help="bootstrap replicas; 0 for none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--all-starts", action="store_true", help="follow every start to the end: slower, the same"
    )
    parser.add_argument("--no-figures", action="store_true", help="numbers only")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae.config import require
    from parcae.files import exclusive, write_text
    from parcae.laws.analysis import Effort, run_study
    from parcae.laws.fit_file import FIT_FILE, write_fit
    from parcae.laws.summary import markdown
    from parcae.laws.table import read_table

    require(arguments.starts >= 1, "--starts", f"{arguments.starts}: too few", "Use at least 1.")
    require(arguments.seed >= 0, "--seed", f"{arguments.seed} is negative", "Use 0 or more.")
    drawn = arguments.draws == 0 or arguments.draws >= 20
    require(drawn, "--draws", f"{arguments.draws}: too few for intervals", "Use 20 or more, or 0.")
    source, out = arguments.table, arguments.out
    if source.is_dir():
        source, out = source / "runs.csv", out or source / "fit"
    table = read_table(source)
    effort = Effort(
        starts=arguments.starts,
        unified_starts=2 * arguments.starts,
        draws=arguments.draws,
        halving=not arguments.all_starts,
        seed=arguments.seed,
    )
    out = out or Path("out/fit")
    with exclusive(out), _steps(table) as step:
        study = run_study(table, effort, step)
        write_fit(out / FIT_FILE, study.tree())
        pictures = [] if arguments.no_figures else _draw(study, out, step)
        write_text(out / "summary.md", markdown(study, pictures))
    _tell(study, out, pictures)
    return 0


def _draw(study: Study, out: Path, step: Step) -> list[str]:
    from parcae.laws.figures import draw_all
    from parcae.laws.page import write_page

    step("figures")
    names = draw_all(study, out)
    write_page(study, out / "laws.html")
    return names


@contextmanager
def _steps(table: Table) -> Iterator[Step]:
    """A bar with what is being done; silent where nobody watches."""
    from parcae import console
    from parcae.laws.analysis import STEPS
    from parcae.laws.design import is_transformer

    looped = [model for model in table.models if not is_transformer(model)]
    with console.progress() as display:
        task = display.add_task("reading", total=STEPS * len(looped) + 1)
        display.advance(task, -1)  # a step is told when it begins
        yield lambda text: display.update(task, description=text, advance=1)


def _tell(study: Study, out: Path, pictures: list[str]) -> None:
    from parcae import console
    from parcae.laws.summary import notes, views

    for view in views(study):
        console.out.print(console.table(view.title, view.columns, view.rows))
    for model, lines in notes(study).items():
        for line in lines:
            text = f"{model}: {line}" if not line.startswith(f"{model}:") else line
            console.out.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    files = ["fit.json", "summary.md", *(["laws.html"] if pictures else []), *pictures]
    text = f"wrote {', '.join(files)} to {out}"
    console.out.print(text, markup=False, highlight=False, soft_wrap=True)
