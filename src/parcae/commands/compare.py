"""`parcae compare`: any number of runs in one table, and item by item with the first."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from parcae.evaluation.paired import PairedComparison
    from parcae.report.comparison import Comparison


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare runs and their evaluations in one table",
        epilog="Evaluated runs are also compared item by item with the first one, on the items "
        "that both have: same task, seed, index and data.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="folder of a run, or folder that `parcae eval` has written",
    )
    parser.add_argument(
        "--loops",
        metavar="T",
        help="number of loops, or one for each run, as in 4,8, or `each` for every number measured "
        "(default: the mean in training where it was scored, else the largest)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--format",
        choices=("markdown", "csv", "latex"),
        help="print the table of runs alone, in this format (default: tables for the terminal)",
    )
    output.add_argument(
        "--json", action="store_true", help="print the comparison as JSON (default: as tables)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    loops = _loops(arguments.loops)

    import parcae
    from parcae import console
    from parcae.files import to_json

    comparison = parcae.compare(*arguments.runs, loops=loops)
    if arguments.json:
        print(to_json(comparison.to_json()), end="")
    elif arguments.format:
        print(comparison.format(arguments.format), end="")
        for line in comparison.notes:
            console.print_text(line, console=console.err)
    else:
        for table in _all_tables(comparison):
            console.out.print(table)
        notes = [line for _, pair in comparison.pairs for line in _notes(pair)]
        for line in dict.fromkeys((*notes, *comparison.notes)):
            console.print_text(line)
    return 0


def _loops(text: str | None) -> Any:
    from parcae.config import ConfigError

    if text is None or text == "each":
        return text
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"loops: {text!r} is not `8`, `4,8` (one for each run) or `each`."
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _all_tables(comparison: Comparison) -> Iterator[Table]:
    """The table of runs; of two evaluations every count, of more the differences alone."""
    from parcae import console
    from parcae.report import seeds
    from parcae.report.comparison import DIGITS, TITLES
    from parcae.tables import text_cells

    columns, rows = text_cells(comparison.table(), titles=TITLES, digits=DIGITS)
    yield console.table("Runs", columns, rows)
    if comparison.seeds:
        yield console.table("Over seeds", *seeds.shown(comparison.seeds, TITLES))
    if len(comparison.pairs) == 1:
        (_, pair) = comparison.pairs[0]
        for entry in pair.comparisons:
            yield from _tables(entry, pair)
    elif comparison.pairs:
        columns = ("run", "task", "loops", "items", "metric", "first", "run", "difference", "p")
        rows = [_difference_row(row) for row in comparison.differences()]
        yield console.table("Difference from the first evaluated run", columns, rows)


def _difference_row(row: dict[str, Any]) -> tuple[object, ...]:
    scale, digits, unit = (100, 1, " in %") if "accuracy" in row["metric"] else (1, 4, "")
    loops = f"{row['loops_a']}, {row['loops_b']}"
    values = (f"{scale * row[side]:.{digits}f}" for side in ("a", "b"))
    difference = _difference({**row, "standard_error": row["difference_error"]}, scale, digits)
    p = "" if row["p"] is None else _p(row["p"])
    metric = row["metric"] + unit
    return (row["run"], row["task"], loops, row["items"], metric, *values, difference, p)


def _tables(entry: dict[str, Any], comparison: PairedComparison) -> Iterator[Table]:
    from parcae import console

    names = [
        f"{letter}, T={entry['loops'][letter.lower()]}" if side.looped else letter
        for letter, side in (("A", comparison.a), ("B", comparison.b))
    ]
    if entry["tasks"]:
        columns = ("task", "questions", *names, "both right", "only A", "only B", "neither")
        columns = (*columns, "B - A", "p")
        rows = [_answers_row(task, of_task) for task, of_task in entry["tasks"].items()]
        yield console.table("Right answers: accuracy and difference in %", columns, rows)
    if entry["texts"]:
        columns = ("text", "items", "unit", *names, "B - A")
        rows = [_text_row(task, of_task) for task, of_task in entry["texts"].items()]
        yield console.table("Loss of text", columns, rows)
    if entry["suites"]:
        columns = ("suite", "tasks", "unit", *names, "B - A")
        rows = [_suite_row(suite, of_suite) for suite, of_suite in entry["suites"].items()]
        yield console.table("Mean over the compared tasks in %", columns, rows)


def _answers_row(task: str, entry: dict[str, Any]) -> tuple[object, ...]:
    draws = entry["answers"] / entry["questions"]
    questions = f"{entry['questions']:,}" + (f" × {draws:.3g}" if draws != 1 else "")
    accuracy = (f"{100 * entry['accuracy'][side]:.1f}" for side in ("a", "b"))
    names = ("both_right", "only_a_right", "only_b_right", "neither_right")
    counts = (f"{entry[name]:,}" for name in names)
    return (task, questions, *accuracy, *counts, _difference(entry, 100, 1), _p(entry["p"]))


def _text_row(task: str, entry: dict[str, Any]) -> tuple[object, ...]:
    nats = (f"{entry['nats'][side]:.4f}" for side in ("a", "b"))
    return (task, f"{entry['items']:,}", entry["unit"], *nats, _difference(entry, 1, 4))


def _suite_row(suite: str, entry: dict[str, Any]) -> tuple[object, ...]:
    tasks = f"{entry['tasks']} of {entry['tasks_wanted']}"
    scores = (f"{100 * entry['score'][side]:.1f}" for side in ("a", "b"))
    return (suite, tasks, entry["unit"], *scores, _difference(entry, 100, 1))


def _difference(entry: dict[str, Any], scale: int, digits: int) -> str:
    error = entry["standard_error"]
    deviation = "" if error is None else f" ± {scale * error:.{digits}f}"
    return f"{scale * entry['difference']:+.{digits}f}{deviation}"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _notes(comparison: PairedComparison) -> Iterator[str]:
    a, b = comparison.a, comparison.b
    yield f"A: {a.checkpoint} ({a.folder})"
    yield f"B: {b.checkpoint} ({b.folder})"
    tasks = [task for entry in comparison.comparisons for task in entry["tasks"].values()]
    if tasks:
        yield "± standard error of the paired differences; p of an exact sign test over questions."
    if any(task["answers"] > task["questions"] for task in tasks):
        yield (
            "× draws of few-shot examples: both right, only A, only B and neither count every "
            "draw; all other columns average the draws of a question."
        )
    if a.context_length != b.context_length:
        lengths = f"{a.context_length:,} and {b.context_length:,}"
        yield f"The context lengths differ, {lengths} tokens: long prompts may be cut differently."
    for entry in comparison.comparisons:
        for name, reason in entry["left_out"].items():
            yield f"Not compared: {name}, because {reason}."
    for side in ("a", "b"):
        counts = {task: number[side] for task, number in comparison.only_in_one.items()}
        unmatched = [f"{task} ({count:,})" for task, count in counts.items() if count]
        if unmatched:
            yield f"Items that only {side.upper()} has, not compared: {', '.join(unmatched)}."
