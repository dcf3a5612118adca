"""`parcae predict`: loops, tokens, losses and costs predicted by fitted laws."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parcae.laws.bootstrap import Estimate
    from parcae.laws.predict import Prediction

QUESTIONS = ("model", "flops", "loss", "loops", "tokens", "test_loops", "tolerance")
EXAMPLES = """
examples:
  parcae predict fit.json --flops 1e19                         loops and tokens for a budget
  parcae predict fit.json --loops 8 --tokens 11e9              the loss of a run
  ... --test-loops 4                                           measured with 4 loops
  ... --tolerance 0.001                                        loops needed at test time
  parcae predict fit.json --loss 2.9                           the FLOPs that reach a loss

From Python: parcae.predict.
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "predict",
        help="predict from fitted laws: loops and tokens for a budget, a loss, or its cost",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("fit", type=Path, metavar="FIT", help="fit.json of `parcae fit`, its folder, or a sweep")
    add("--model", help="name of the model (default: the only one with laws)")
    add("--flops", type=float, metavar="C", help="training budget in FLOPs (default: none)")
    add("--loss", type=float, metavar="L", help="loss to reach, in nats (default: none)")
    add(
        "--loops",
        type=float,
        metavar="MU",
        help="mean loops of a training run; needs --tokens (default: none)",
    )
    add(
        "--tokens",
        type=float,
        metavar="D",
        help="training tokens of a run; needs --loops (default: none)",
    )
    add(
        "--test-loops",
        type=float,
        metavar="T",
        help="loops at test time (default: the mean loops of the run)",
    )
    add(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="also print the test-time loops after which the loss is within this share of its "
        "limit; 0.001 is 0.1 %% (default: none)",
    )
    add("--json", action="store_true", help="print JSON instead of a table (default: off)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import json

    import parcae

    questions = {name: getattr(arguments, name) for name in QUESTIONS}
    prediction = parcae.predict(arguments.fit, **questions)
    if arguments.json:
        print(json.dumps(prediction.to_dict(), indent=2, allow_nan=False))
    else:
        _print(prediction, arguments)
    return 0


def _print(prediction: Prediction, arguments: argparse.Namespace) -> None:
    from parcae import console

    rows: list[tuple[str, str, str]] = []
    if best := prediction.recommendation:
        rows += [
            (
                f"optimal loops for {console.format_flops(best.flops)} FLOPs",
                *_cells(best.loops, ".3g"),
            ),
            ("tokens", *_cells(best.tokens, ".4g")),
            ("loss", *_cells(best.loss, ".4f")),
            (
                "with a whole number of loops",
                f"{best.whole_loops}, {best.whole_tokens:.4g} tokens, loss {best.whole_loss:.4f}",
                "",
            ),
        ]
        if optimum := best.by_parabolas:
            rows += [
                ("loops by the parabolas' power law", *_cells(optimum.loops, ".3g")),
                ("tokens by the parabolas' power law", *_cells(optimum.tokens, ".4g")),
            ]
    if needed := prediction.flops:
        rows.append((f"FLOPs for a loss of {arguments.loss:g}", *_cells(needed.estimate, ".3g")))
    if loss := prediction.loss:
        run = f"loss at {arguments.loops:g} loops, {arguments.tokens:.4g} tokens"
        if arguments.test_loops is not None:
            run += f", T = {arguments.test_loops:g}"
        rows.append((run, *_cells(loss.estimate, ".4f")))
    if worth := prediction.saturation_loops:
        share = f"{100 * arguments.tolerance:g} %"
        text = f"test-time loops for a loss within {share} of its limit"
        rows.append((text, *_cells(worth.estimate, ".3g")))
    console.out.print(console.table(prediction.model, ("", "value", "90 % interval"), rows))
    for note in prediction.notes:
        console.print_text(note, style="yellow")


def _cells(estimate: Estimate, form: str) -> tuple[str, str]:
    if estimate.low is None or estimate.high is None:
        return format(estimate.value, form), "–"
    return format(estimate.value, form), f"{estimate.low:{form}} … {estimate.high:{form}}"
