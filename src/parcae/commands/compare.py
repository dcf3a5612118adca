"""`parcae compare`: two evaluations item by item."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from parcae.evaluation.finished import Evaluation


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="set two evaluations side by side, item by item",
        epilog="Both folders are of `parcae eval`, or of the runs they stand in. What counts is "
        "the items both have: same task, seed, index and data. Differences are B - A.",
    )
    parser.add_argument("a", metavar="EVAL", help="A, what is compared with")
    parser.add_argument("b", metavar="EVAL", help="B")
    parser.add_argument(
        "--loops",
        metavar="A,B",
        help="loops of A and of B; or one number for both; or `each`, every depth that both have "
        "(default: the deepest of each)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.evaluation.compare import choose_loops, compare, only_in_one
    from parcae.evaluation.finished import read_evaluation
    from parcae.files import to_json

    a, b = read_evaluation(arguments.a), read_evaluation(arguments.b)
    found = [compare(a, b, loops) for loops in choose_loops(a, b, arguments.loops)]
    apart = only_in_one(a, b)
    if arguments.json:
        sides = {"a": _describe(a), "b": _describe(b)}
        print(to_json({**sides, "comparisons": found, "only_in_one": apart}), end="")
        return 0
    for one in found:
        for table in _tables(one, a, b):
            console.out.print(table)
    for line in _notes(found, a, b, apart):
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _describe(one: Evaluation) -> dict[str, Any]:
    return {
        "folder": str(one.folder),
        "checkpoint": one.checkpoint,
        "looped": one.is_looped,
        "loops": list(one.loops),
        "context_length": one.context_length,
    }


def _tables(found: dict[str, Any], a: Evaluation, b: Evaluation) -> Iterator[Table]:
    from parcae import console

    names = [
        f"{letter}, T={found['loops'][letter.lower()]}" if one.is_looped else letter
        for letter, one in (("A", a), ("B", b))
    ]
    if found["tasks"]:
        columns = ("task", "questions", *names, "both", "only A", "only B", "neither", "B - A", "p")
        rows = [_answers_row(task, one) for task, one in found["tasks"].items()]
        yield console.table("Right answers: accuracy and differences in %", columns, rows)
    if found["texts"]:
        columns = ("text", "items", "unit", *names, "B - A")
        rows = [_text_row(task, one) for task, one in found["texts"].items()]
        yield console.table("Loss of text", columns, rows)


def _answers_row(task: str, one: dict[str, Any]) -> tuple[object, ...]:
    draws = one["answers"] / one["questions"]
    asked = f"{one['questions']:,}" + (f" × {draws:.3g}" if draws != 1 else "")
    accuracy = (f"{100 * one['accuracy'][side]:.1f}" for side in ("a", "b"))
    counts = (
        f"{one[name]:,}" for name in ("both_right", "only_a_right", "only_b_right", "neither_right")
    )
    return (task, asked, *accuracy, *counts, _difference(one, 100, 1), _p(one["p"]))


def _text_row(task: str, one: dict[str, Any]) -> tuple[object, ...]:
    nats = (f"{one['nats'][side]:.4f}" for side in ("a", "b"))
    return (task, f"{one['items']:,}", one["unit"], *nats, _difference(one, 1, 4))


def _difference(one: dict[str, Any], scale: int, digits: int) -> str:
    error = one["standard_error"]
    spread = "" if error is None else f" ± {scale * error:.{digits}f}"
    return f"{scale * one['difference']:+.{digits}f}{spread}"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _notes(
    found: list[dict[str, Any]], a: Evaluation, b: Evaluation, apart: dict[str, dict[str, int]]
) -> Iterator[str]:
    yield f"A: {a.checkpoint} ({a.folder})"
    yield f"B: {b.checkpoint} ({b.folder})"
    tasks = [task for one in found for task in one["tasks"].values()]
    if tasks:
        yield "± standard error of the paired differences; p of an exact sign test over questions."
    if any(task["answers"] > task["questions"] for task in tasks):
        yield (
            "× draws of examples: both, only A, only B and neither count each, all else averages "
            "the draws of a question."
        )
    if a.context_length != b.context_length:
        lengths = f"{a.context_length:,} and {b.context_length:,}"
        yield f"The contexts differ, {lengths} tokens, so long prompts may be cut differently."
    for side in ("a", "b"):
        alone = [f"{task} ({counts[side]:,})" for task, counts in apart.items() if counts[side]]
        if alone:
            yield f"Items that only {side.upper()} has, left out: {', '.join(alone)}."
