"""`parcae compare`: two evaluations item by item."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from parcae.evaluation.compare import Comparison


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare two evaluations item by item",
        epilog="Compares the items that both evaluations have: same task, seed, index and data. "
        "Differences are B - A.",
    )
    help = "folder that `parcae eval` has written, or the run it belongs to"
    parser.add_argument("a", metavar="A", help=help)
    parser.add_argument("b", metavar="B", help=help)
    parser.add_argument(
        "--loops",
        metavar="A,B",
        help="number of loops of A and of B, or one number for both, or `each` for every number "
        "that both have (default: the largest of each)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the comparison as JSON (default: as tables)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    loops = _loops(arguments.loops)

    from parcae import console
    from parcae.evaluation.compare import compare
    from parcae.files import to_json

    comparison = compare(arguments.a, arguments.b, loops)
    if arguments.json:
        print(to_json(comparison.to_json()), end="")
        return 0
    for entry in comparison.comparisons:
        for table in _tables(entry, comparison):
            console.out.print(table)
    for line in _notes(comparison):
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _loops(text: str | None) -> int | tuple[int, int] | str | None:
    from parcae.config import ConfigError

    if text is None or text == "each":
        return text
    try:
        numbers = [int(number) for number in text.split(",")]
        first, second = numbers * 2 if len(numbers) == 1 else numbers
    except ValueError:
        raise ConfigError(f"loops: {text!r} is not `8`, `4,8` (of A, of B) or `each`.") from None
    return first, second


def _tables(entry: dict[str, Any], comparison: Comparison) -> Iterator[Table]:
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


def _notes(comparison: Comparison) -> Iterator[str]:
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
