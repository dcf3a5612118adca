"""`parcae depth`: what each loop does to the prediction of each token of a text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.evaluation.depth import DepthProfile

MOST_LOOPS = 256
MOST_TOKENS = 1024
"""What a picture has room for."""


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "depth",
        help="show how loss, state and prediction evolve over the loops, token by token",
        epilog="The picture shows a loop in each row and a token in each column; a line marks the "
        "loop after which the likeliest token stays the same.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder of a model, of a run, or RUN/checkpoints/…"
    )
    parser.add_argument("text", metavar="TEXT", help="text, @file, or - for standard input")
    parser.add_argument(
        "--loops",
        type=int,
        metavar="T",
        help=f"loops, at most {MOST_LOOPS} (default: the mean in training)",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="of a longer text, the first N"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PICTURE",
        help=".png, .svg or .pdf (default: RUN/depth.png; out/depth.png if it is not a run)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="where it is not beside")
    parser.add_argument(
        "--best", action="store_true", help="a run's best checkpoint instead of its newest"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae.commands.text_argument import read_words

    _check(arguments)
    text = read_words(arguments.text)

    from parcae import console  # wrong usage need not wait for these
    from parcae.config import ConfigError, require
    from parcae.evaluation.depth import follow
    from parcae.evaluation.depth_map import picture
    from parcae.infer.sampling import BrokenLogits
    from parcae.runs import open_checkpoint

    model, tokenizer, folder = open_checkpoint(
        arguments.checkpoint, arguments.tokenizer, arguments.best
    )
    whole = tokenizer.encode(text)
    require(bool(whole), "text", "it is empty", "Give a few words.")
    kept = whole[: min(arguments.tokens, model.config.context_length)]
    try:
        profile = follow(model, [tokenizer.bos, *kept], arguments.loops)
    except BrokenLogits as error:
        raise ConfigError(f"{folder}: {error}") from None
    spelled = [word.decode(errors="replace") for word in tokenizer.token_bytes]
    spelled += [f"#{token}" for token in range(len(spelled), model.config.vocab_size)]
    labels = [spelled[token] for token in kept]
    out = arguments.out or _default_path(folder)
    path = picture(profile, labels, f"{_name(folder)}, loop by loop", out)
    if len(kept) < len(whole):
        words = f"The first {len(kept)} of {len(whole)} tokens; --tokens takes more, up to the "
        words += f"model's context of {model.config.context_length}."
        console.err.print(words, style="yellow", highlight=False, soft_wrap=True)
    if arguments.json:
        _print_json(profile, spelled, folder, path, len(whole))
    else:
        _print_table(profile, spelled)
        console.out.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from parcae.config import require

    out, kinds = arguments.out, (".png", ".svg", ".pdf")
    is_picture = out is None or out.suffix in kinds
    require(is_picture, "--out", f"{out} is no picture", "Use .png, .svg or .pdf.")
    for flag, value, most in (
        ("--loops", arguments.loops, MOST_LOOPS),
        ("--tokens", arguments.tokens, MOST_TOKENS),
    ):
        fits = value is None or 1 <= value <= most
        require(fits, flag, f"{value} is out of range", f"Use 1 to {most:,}.")


def _default_path(folder: Path) -> Path:
    """In the run; nothing is written into a model folder that is not part of a run."""
    from parcae.runs.layout import DEPTH_FIGURE, run_of

    return (run_of(folder) or Path("out")) / DEPTH_FIGURE


def _name(folder: Path) -> str:
    """`run/step-00000300` for a checkpoint, the folder's own name otherwise."""
    from parcae.runs import run_of

    run = run_of(folder)
    return folder.absolute().name if run is None else f"{run.absolute().name}/{folder.name}"


def shown_depths(loops: int) -> list[int]:
    """1, 2, 4, .. and the last."""
    return sorted({2**k for k in range(loops.bit_length()) if 2**k <= loops} | {loops})


def _print_table(profile: DepthProfile, spelled: list[str]) -> None:
    from parcae import console

    depths = shown_depths(profile.loops)
    settled = profile.settled.tolist()
    first, last = profile.predicted[0].tolist(), profile.predicted[-1].tolist()
    rows = [
        (
            repr(spelled[token]),
            *(f"{profile.loss[t - 1, place]:.2f}" for t in depths),
            f"{profile.change[-1, place]:.2g}",
            settled[place],
            repr(spelled[first[place]]),
            repr(spelled[last[place]]),
        )
        for place, token in enumerate(profile.targets.tolist())
    ]
    means = (f"{profile.loss[t - 1].mean():.2f}" for t in depths)
    change = f"{profile.change[-1].mean():.2g}"
    rows.append(("mean", *means, change, f"{sum(settled) / len(settled):.1f}", "", ""))
    columns = ("token", *(f"T={t}" for t in depths), "moves", "settled")
    columns = (*columns, "T=1 says", f"T={profile.loops} says")
    title = "Loss in nats after T loops; how far the last loop moves; when the prediction settled"
    console.out.print(console.table(title, columns, rows))


def _print_json(
    profile: DepthProfile, spelled: list[str], folder: Path, path: Path, whole: int
) -> None:
    import json

    tokens = profile.targets.tolist()
    tree: dict[str, Any] = {
        "checkpoint": str(folder),
        "picture": str(path),
        "loops": profile.loops,
        "tokens_of_text": whole,
        "mean_loss": profile.loss.mean(1).tolist(),
        "mean_change": profile.change.mean(1).tolist(),
        "tokens": [
            {
                "token": token,
                "text": spelled[token],
                "loss": profile.loss[:, place].tolist(),
                "change": profile.change[:, place].tolist(),
                "predicted": profile.predicted[:, place].tolist(),
                "predicted_text": [spelled[one] for one in profile.predicted[:, place].tolist()],
                "settled": int(profile.settled[place]),
            }
            for place, token in enumerate(tokens)
        ],
    }
    print(json.dumps(tree, ensure_ascii=False, allow_nan=False))
