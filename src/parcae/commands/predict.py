"""`parcae predict`: what a fit says about runs that nobody has made."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.laws.fit_file import FittedModel
    from parcae.laws.predict import Estimate

EXAMPLES = """
  parcae predict --fit fit.json --flops 1e19                   loops and tokens for a budget
  parcae predict --fit fit.json --loops 8 --tokens 11e9        the loss of a run
  ... --test-loops 4                                           measured with 4 loops
  ... --tolerance 0.001                                        loops that are worth using
  parcae predict --fit fit.json --loss 2.9                     what a loss costs
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "predict",
        help="ask a fit: loops and tokens for a budget, the loss of a run, the cost of a loss",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fit", type=Path, required=True, metavar="fit.json")
    parser.add_argument("--model", help="which, where the fit holds several")
    parser.add_argument("--flops", type=float, metavar="C", help="a budget of training")
    parser.add_argument("--loss", type=float, help="a loss to reach")
    parser.add_argument("--loops", type=float, metavar="MU", help="mean loops in training")
    parser.add_argument("--tokens", type=float, metavar="D", help="tokens of training")
    parser.add_argument("--test-loops", type=float, metavar="T", help="loops at test time")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="of the loss: 0.001 is a tenth of a percent",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import json

    from parcae.laws.fit_file import choose_model, plain, read_fit

    _check(arguments)
    model = choose_model(read_fit(arguments.fit), arguments.model)
    answers = _ask(model, arguments)
    if arguments.json:
        tree = {"model": model.model, **{name: plain(answer) for name, answer in answers.items()}}
        print(json.dumps(tree, indent=2, allow_nan=False))
    else:
        _tell(model, answers, arguments)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from parcae.config import require

    run_given = arguments.loops is not None and arguments.tokens is not None
    asked = arguments.flops is not None or arguments.loss is not None or run_given
    require(asked, "predict", "nothing is asked", "Give --flops, --loss, or --loops with --tokens.")
    for name in ("test_loops", "tolerance"):
        require(
            getattr(arguments, name) is None or run_given,
            f"--{name.replace('_', '-')}",
            "it is about a run",
            "Give --loops and --tokens with it.",
        )


def _ask(model: FittedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    from parcae.laws import predict

    answers: dict[str, Any] = {}
    loops, tokens = arguments.loops, arguments.tokens
    if arguments.flops is not None:
        answers["recommendation"] = predict.recommend(model, arguments.flops)
    if arguments.loss is not None:
        answers["flops"] = predict.flops_needed(model, arguments.loss)
    if loops is not None and tokens is not None:
        answers["loss"] = predict.loss_at(model, loops, tokens, arguments.test_loops)
        if arguments.tolerance is not None:
            answers["worth"] = predict.loops_worth(model, loops, tokens, arguments.tolerance)
    return answers


def _tell(model: FittedModel, answers: dict[str, Any], arguments: argparse.Namespace) -> None:
    from parcae import console

    rows: list[tuple[str, str, str]] = []
    if best := answers.get("recommendation"):
        rows += [
            (f"loops for {best.flops:.3g} FLOPs", *_cells(best.loops, ".3g")),
            ("tokens", *_cells(best.tokens, ".4g")),
            ("loss", *_cells(best.loss, ".4f")),
            (
                "as a whole number of loops",
                f"{best.whole_loops}, {best.whole_tokens:.4g} tokens, loss {best.whole_loss:.4f}",
                "",
            ),
        ]
        if also := best.by_parabolas:
            rows += [
                ("loops by the parabolas' power law", *_cells(also.loops, ".3g")),
                ("tokens by the parabolas' power law", *_cells(also.tokens, ".4g")),
            ]
    if need := answers.get("flops"):
        text = f"FLOPs for a loss of {arguments.loss:g}"
        rows.append((text, *_cells(need.estimate, ".3g")))
    if loss := answers.get("loss"):
        at = f"loss at {arguments.loops:g} loops, {arguments.tokens:.4g} tokens"
        if arguments.test_loops is not None:
            at += f", T = {arguments.test_loops:g}"
        rows.append((at, *_cells(loss.estimate, ".4f")))
    if worth := answers.get("worth"):
        text = f"loops worth using (within {100 * arguments.tolerance:g} % of endless loops)"
        rows.append((text, *_cells(worth.estimate, ".3g")))
    console.out.print(console.table(model.model, ("", "value", "90 % interval"), rows))
    notes = [note for answer in answers.values() for note in answer.notes]
    for note in dict.fromkeys(notes):
        console.out.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _cells(estimate: Estimate, form: str) -> tuple[str, str]:
    if estimate.low is None or estimate.high is None:
        return format(estimate.value, form), "–"
    return format(estimate.value, form), f"{estimate.low:{form}} … {estimate.high:{form}}"
