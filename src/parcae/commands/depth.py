"""`parcae depth`: what each loop does to the prediction of each token of a text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcae.device import DEVICE_HELP

if TYPE_CHECKING:
    from parcae.evaluation.loop_trace import LoopTrace

MAX_LOOPS = 256
MAX_TOKENS = 1024
"""Limits of a readable figure."""
FIGURE_TYPES = (".png", ".svg", ".pdf")


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "depth",
        help="show how loss, state and prediction change over the loops, token by token",
        epilog="The figure has a row for each loop and a column for each token; a line marks the "
        "loop after which the most likely token no longer changes.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder of a model, a run or a checkpoint"
    )
    parser.add_argument("text", metavar="TEXT", help="text, @file, or - for standard input")
    parser.add_argument(
        "--loops",
        type=int,
        metavar="T",
        help=f"number of loops, at most {MAX_LOOPS} (default: the mean in training)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=64,
        metavar="N",
        help=f"use the first N tokens of the text, at most {MAX_TOKENS:,} (default: 64)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="figure as .png, .svg or .pdf (default: RUN/depth.png, or out/depth.png for a model "
        "that is not part of a run)",
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help=DEVICE_HELP)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer of the model (default: tokenizer.json in its folder or its run)",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="use a run's checkpoint with the lowest validation loss (default: the newest)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the values as JSON (default: as a table)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae.commands.text_argument import read_text

    _check(arguments)
    text = read_text(arguments.text)

    from parcae import console  # errors in the arguments need not wait for these imports
    from parcae.commands.generation_output import quoted
    from parcae.config import ConfigError, require
    from parcae.evaluation.loop_trace import trace_loops
    from parcae.infer.sampling import NonFiniteLogits
    from parcae.report.trace_figure import draw_trace
    from parcae.runs import open_checkpoint, task_of_run

    model, tokenizer, folder = open_checkpoint(
        arguments.checkpoint,
        tokenizer=arguments.tokenizer,
        best=arguments.best,
        device=arguments.device,
    )
    tokens = tokenizer.encode(text)
    require(bool(tokens), "text", "it is empty", "Give at least one word.")
    used = tokens[: min(arguments.tokens, model.config.context_length)]
    read, answers = [tokenizer.bos, *used], None
    if task := task_of_run(folder):
        length = model.config.context_length
        read, answers = read[:length], task.answers_in(read)[:length]
    try:
        trace = trace_loops(model, read, arguments.loops, answers)
    except NonFiniteLogits as error:
        raise ConfigError(f"{folder}: {error}") from None
    vocabulary = tokenizer.token_bytes
    unknown = [f"#{token}" for token in range(len(vocabulary), model.config.vocab_size)]
    # Bytes that are no character alone are shown as \xe6.
    texts = [token.decode(errors="backslashreplace") for token in vocabulary] + unknown
    out = arguments.out or _default_path(folder)
    labels = [texts[token] for token in trace.targets.tolist()]
    path = draw_trace(trace, labels, f"{_name(folder)}, loop by loop", out)
    if len(used) < len(tokens):
        warning = f"Used the first {len(used)} of {len(tokens)} tokens. --tokens sets the number, "
        warning += f"up to the model's context length of {model.config.context_length}."
        console.err.print(warning, style="yellow", highlight=False, soft_wrap=True)
    if arguments.json:
        _print_json(trace, texts, folder, path, len(tokens))
    else:
        _print_table(trace, [quoted(token) for token in vocabulary] + unknown)
        console.out.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from parcae.config import require

    out = arguments.out
    is_figure = out is None or out.suffix in FIGURE_TYPES
    require(is_figure, "--out", f"{out} is not a figure", "Use .png, .svg or .pdf.")
    for option, value, limit in (
        ("--loops", arguments.loops, MAX_LOOPS),
        ("--tokens", arguments.tokens, MAX_TOKENS),
    ):
        fits = value is None or 1 <= value <= limit
        require(fits, option, f"{value} is out of range", f"Use 1 to {limit:,}.")


def _default_path(folder: Path) -> Path:
    """In the run; nothing is written into a model folder that is not part of a run."""
    from parcae.runs.layout import DEPTH_FIGURE, run_of

    return (run_of(folder) or Path("out")) / DEPTH_FIGURE


def _name(folder: Path) -> str:
    """`run/step-00000300` for a checkpoint, the folder's own name otherwise."""
    from parcae.runs import run_of

    run = run_of(folder)
    return folder.absolute().name if run is None else f"{run.absolute().name}/{folder.name}"


def _print_table(trace: LoopTrace, names: list[str]) -> None:
    from parcae import console
    from parcae.evaluation.loop_trace import shown_depths

    depths = shown_depths(trace.loops)
    settled = trace.settled.tolist()
    first, last = trace.predicted[0].tolist(), trace.predicted[-1].tolist()
    rows = [
        (
            names[token],
            f"{trace.loss[-1, index] - trace.loss[0, index]:+.2f}",
            *(f"{trace.loss[t - 1, index]:.2f}" for t in depths),
            f"{trace.change[-1, index]:.2g}",
            settled[index],
            names[first[index]],
            names[last[index]],
        )
        for index, token in enumerate(trace.targets.tolist())
    ]
    means = (f"{trace.loss[t - 1].mean():.2f}" for t in depths)
    gain = f"{(trace.loss[-1] - trace.loss[0]).mean():+.2f}"
    change = f"{trace.change[-1].mean():.2g}"
    rows.append(("mean", gain, *means, change, f"{sum(settled) / len(settled):.1f}", "", ""))
    columns = ("token", "loss by looping", *(f"T={t}" for t in depths), "last change", "settled at")
    columns = (*columns, "prediction T=1", f"prediction T={trace.loops}")
    title = (
        "Change of the loss since the first loop, in nats; loss after T loops; relative change of "
        "the state by the last loop; loop after which the prediction no longer changes"
    )
    console.out.print(f"{trace.conclusion}\n", highlight=False, soft_wrap=True)
    console.out.print(console.table(title, columns, rows))


def _print_json(
    trace: LoopTrace, texts: list[str], folder: Path, path: Path, token_count: int
) -> None:
    import json

    tree: dict[str, Any] = {
        "checkpoint": str(folder),
        "picture": str(path),
        "loops": trace.loops,
        "conclusion": trace.conclusion,
        "tokens_of_text": token_count,
        "mean_loss": trace.loss.mean(1).tolist(),
        "mean_change": trace.change.mean(1).tolist(),
        "tokens": [
            {
                "token": token,
                "text": texts[token],
                "loss": trace.loss[:, index].tolist(),
                "change": trace.change[:, index].tolist(),
                "predicted": trace.predicted[:, index].tolist(),
                "predicted_text": [texts[other] for other in trace.predicted[:, index].tolist()],
                "settled": int(trace.settled[index]),
            }
            for index, token in enumerate(trace.targets.tolist())
        ],
    }
    print(json.dumps(tree, ensure_ascii=False, allow_nan=False))
