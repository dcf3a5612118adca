"""`parcae generate`: text from a checkpoint, at any depth, with what it cost."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from parcae.infer.engine import Engine
    from parcae.runs import Checkpoint


class Option(NamedTuple):
    """A setting of a request: a flag here, a line such as `/loops 4` in a conversation."""

    flag: str
    name: str
    """As `Engine.request` calls it."""
    read: Callable[[str], Any]
    default: Any
    metavar: str
    help: str


ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


def unescape(text: str) -> str:
    r"""A line break for \n, a tab for \t, and \ for \\; any other \ stands for itself."""
    return re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], text)


OPTIONS = (
    Option("loops", "loops", int, None, "T", "loops per token (default: the mean in training)"),
    Option("exit", "exit", str, None, "RULE", "kl:0.01, entropy:0.01, state:0.05 or budget:4"),
    Option("draft", "draft_loops", int, 0, "D", "speculate: D loops draft, all loops verify"),
    Option("draft-tokens", "draft_tokens", int, 4, "K", "tokens drafted at a time (default: 4)"),
    Option("start", "start", str, "zero", "STATE", "a new token's first state: zero or previous"),
    Option("extrapolation", "extrapolation", str, "none", "KIND", "none, aitken or anderson"),
    Option("new-tokens", "new_tokens", int, 128, "N", "tokens at most (default: 128)"),
    Option("temperature", "temperature", float, 0.8, "X", "0 is greedy (default: 0.8)"),
    Option("top-k", "top_k", int, None, "K", "draw from the K likeliest tokens"),
    Option("top-p", "top_p", float, None, "P", "draw from the likeliest that hold a share P"),
    Option("min-p", "min_p", float, None, "P", "draw from those P times as likely as the best"),
    Option("repetition-penalty", "repetition_penalty", float, 1.0, "X", "above 1: repeat less"),
    Option("seed", "seed", int, 0, "N", "of the noise; a seed gives the same text (default: 0)"),
    Option(
        "stop",
        "stop",
        unescape,
        (),
        "STRING",
        r"end before this string, where \n is a line break, \t a tab, \\ a backslash",
    ),
    Option("logprobs", "logprobs", int, None, "K", "list each token's logprob and K alternatives"),
)


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="write text with a trained model, at any depth",
        epilog="Without a prompt: a conversation in a terminal, else standard input is the prompt. "
        "The text goes to standard output, what it cost to standard error.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder of a model, of a run, or RUN/checkpoints/…"
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text, @file, or - for stdin")
    for option in OPTIONS:
        several: dict[str, Any] = {"action": "append"} if option.name == "stop" else {}
        parser.add_argument(
            f"--{option.flag}",
            dest=option.name,
            type=option.read,
            default=None if several else option.default,
            metavar=option.metavar,
            help=option.help + ("; may be repeated" if several else ""),
            **several,
        )
    parser.add_argument(
        "--cache", default="full", metavar="POLICY", help="full, last:K, first:K or shared"
    )
    parser.add_argument(
        "--weights", default="float32", choices=("float32", "int8", "bfloat16"), help="in memory"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="where it is not beside")
    parser.add_argument(
        "--best", action="store_true", help="a run's best checkpoint instead of its newest"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae.commands.text_argument import read_words
    from parcae.config import ConfigError, require

    word = _prompt(arguments)
    interactive = word is None and sys.stdin.isatty()
    asked = not (interactive and arguments.json)
    require(asked, "--json", "there is no prompt", "Give one, or leave --json out.")
    prompt = None if interactive else read_words("-" if word is None else word)

    from parcae.commands.repl import converse  # wrong usage need not wait for these
    from parcae.infer.engine import Engine
    from parcae.infer.sampling import BrokenLogits
    from parcae.runs import open_checkpoint

    opened = open_checkpoint(arguments.checkpoint, arguments.tokenizer, arguments.best)
    engine = Engine(
        opened.model,
        opened.tokenizer,
        cache=arguments.cache,
        weights=arguments.weights,
        rows=4 if interactive else 1,
    )
    options = {option.name: getattr(arguments, option.name) for option in OPTIONS}
    options["stop"] = tuple(options["stop"] or ())
    try:
        if prompt is None:
            converse(engine, options, opened.folder)
        else:
            _write(engine, prompt, options, opened, arguments.json)
    except BrokenLogits as error:
        raise ConfigError(f"{opened.folder}: {error}") from None
    return 0


def _prompt(arguments: argparse.Namespace) -> str | None:
    """An optional word that follows options is left over by argparse: it is the prompt."""
    from parcae.config import ConfigError

    left = list(arguments.settings)
    if arguments.prompt is None and left and not _is_flag(left[0]):
        arguments.prompt = left.pop(0)
    if left:
        what = "no such option" if _is_flag(left[0]) else "one prompt too many"
        raise ConfigError(f"{left[0]}: {what}. See --help; quote a prompt of several words.")
    return arguments.prompt


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and " " not in word


def _write(
    engine: Engine, prompt: str, options: dict[str, Any], opened: Checkpoint, as_json: bool
) -> None:
    from parcae.commands.generation_output import as_tree, tell, write_prompt, write_text
    from parcae.infer.meter import Meter

    request = engine.request(prompt, **options)
    meter = Meter()
    if not as_json:
        write_prompt(prompt)
    for piece in meter.watch(engine.stream(prompt, **options)):
        if not as_json:
            write_text(piece.text)
    if as_json:
        import json

        tree = {"checkpoint": str(opened.folder), "prompt": prompt}
        tree |= as_tree(engine, request, meter)
        print(json.dumps(tree, ensure_ascii=False, allow_nan=False))
    else:
        write_text("\n")
        tell(engine, request, meter)
