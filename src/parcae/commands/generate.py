"""`parcae generate`: write text with a trained model, at any depth."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from parcae.device import DEVICE_HELP
from parcae.infer import DRAFT_TOKENS, MAX_NEW_TOKENS, TEMPERATURE

if TYPE_CHECKING:
    from parcae.infer.engine import Engine
    from parcae.runs import Checkpoint


class Option(NamedTuple):
    """A setting of a request: an option here, a line such as `/loops 4` in the interactive mode."""

    flag: str
    name: str
    """As `Engine.request` calls it."""
    read: Callable[[str], Any]
    default: Any
    metavar: str
    help: str


ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


def unescape(text: str) -> str:
    r"""Replace \n by a line break, \t by a tab and \\ by \; any other \ is unchanged."""
    return re.sub(r"\\[nt\\]", lambda match: ESCAPES[match[0]], text)


OPTIONS = (
    Option("loops", "loops", int, None, "T", "loops per token (default: the mean of training)"),
    Option(
        "exit",
        "exit",
        str,
        None,
        "RULE",
        "stop looping early, per token: state:0.1 (relative change of the state), kl:0.01 (change "
        "of the prediction, in nats), budget:4 (loops), or NAME:THRESHOLD of a registered rule "
        "(default: never)",
    ),
    Option(
        "draft-loops",
        "draft_loops",
        int,
        0,
        "D",
        "speculative decoding: draft with D loops, verify with all (default: 0, off)",
    ),
    Option(
        "draft-tokens",
        "draft_tokens",
        int,
        DRAFT_TOKENS,
        "K",
        f"tokens per draft (default: {DRAFT_TOKENS})",
    ),
    Option(
        "max-new-tokens",
        "max_new_tokens",
        int,
        MAX_NEW_TOKENS,
        "N",
        f"largest number of tokens (default: {MAX_NEW_TOKENS})",
    ),
    Option(
        "temperature",
        "temperature",
        float,
        TEMPERATURE,
        "X",
        f"0 is greedy (default: {TEMPERATURE})",
    ),
    Option("top-k", "top_k", int, None, "K", "sample from the K likeliest tokens (default: all)"),
    Option(
        "top-p",
        "top_p",
        float,
        None,
        "P",
        "sample from the likeliest tokens with total probability P (default: all)",
    ),
    Option(
        "min-p",
        "min_p",
        float,
        None,
        "P",
        "sample from tokens at least P times as likely as the likeliest (default: all)",
    ),
    Option(
        "repetition-penalty",
        "repetition_penalty",
        float,
        1.0,
        "X",
        "above 1, tokens already seen become less likely (default: 1)",
    ),
    Option("seed", "seed", int, 0, "N", "random seed, which fixes the text (default: 0)"),
    Option(
        "stop",
        "stop",
        unescape,
        (),
        "STRING",
        r"end the text before this string, where \n is a line break, \t a tab, \\ a backslash "
        "(default: none)",
    ),
    Option(
        "logprobs",
        "logprobs",
        int,
        None,
        "K",
        "list the log-probability of each token and of the K likeliest (default: off)",
    ),
)


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="write text with a trained model, at any depth",
        epilog="Without PROMPT the command is interactive in a terminal; otherwise the prompt is "
        "read from standard input. The text goes to standard output, speed and memory to standard "
        "error.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a model folder, a run, or RUN/checkpoints/step-N"
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text, @FILE, or - for stdin")
    for option in OPTIONS:
        repeated: dict[str, Any] = {"action": "append"} if option.name == "stop" else {}
        parser.add_argument(
            f"--{option.flag}",
            dest=option.name,
            type=option.read,
            default=None if repeated else option.default,
            metavar=option.metavar,
            help=option.help + ("; may be repeated" if repeated else ""),
            **repeated,
        )
    parser.add_argument(
        "--cache",
        default="full",
        metavar="POLICY",
        help="which loops share keys and values: full, last:K, first:K or shared (default: full, "
        "which is exact)",
    )
    parser.add_argument(
        "--weight-dtype",
        default="float32",
        choices=("float32", "int8", "bfloat16"),
        help="storage format of weight matrices (default: float32)",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=("float32", "bfloat16"),
        help="storage format of keys and values; bfloat16 takes half the memory of float32 "
        "(default: float32 on a CPU, else the model's)",
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help=DEVICE_HELP)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer to use (default: the one in the checkpoint's folder or its run)",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="use the run's checkpoint with the lowest validation loss (default: the newest)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object (default: stream the text)",
    )
    parser.set_defaults(run=run, takes_rest=True)


def run(arguments: argparse.Namespace) -> int:
    from parcae.commands.text_argument import read_text
    from parcae.config import ConfigError, require

    argument = _prompt(arguments)
    interactive = argument is None and sys.stdin.isatty()
    valid = not (interactive and arguments.json)
    require(valid, "--json", "there is no prompt", "Give one, or omit --json.")
    prompt = None if interactive else read_text("-" if argument is None else argument)

    from parcae.commands.repl import run_repl  # slow imports, after the arguments are checked
    from parcae.infer.engine import Engine
    from parcae.infer.sampling import NonFiniteLogits
    from parcae.runs import open_checkpoint

    checkpoint = open_checkpoint(
        arguments.checkpoint,
        tokenizer=arguments.tokenizer,
        best=arguments.best,
        device=arguments.device,
    )
    engine = Engine(
        checkpoint.model,
        checkpoint.tokenizer,
        cache=arguments.cache,
        weight_dtype=arguments.weight_dtype,
        cache_dtype=arguments.cache_dtype,
        max_batch_size=4 if interactive else 1,
    )
    options = {option.name: getattr(arguments, option.name) for option in OPTIONS}
    options["stop"] = tuple(options["stop"] or ())
    try:
        if prompt is None:
            run_repl(engine, options, checkpoint.folder)
        else:
            _write(engine, prompt, options, checkpoint, arguments.json)
    except NonFiniteLogits as error:
        raise ConfigError(f"{checkpoint.folder}: {error}") from None
    return 0


def _prompt(arguments: argparse.Namespace) -> str | None:
    """The prompt; argparse puts one that follows options into `settings`."""
    from parcae.config import ConfigError

    rest = list(arguments.settings)
    if arguments.prompt is None and rest and not _is_flag(rest[0]):
        arguments.prompt = rest.pop(0)
    if rest:
        problem = "no such option" if _is_flag(rest[0]) else "a second prompt"
        raise ConfigError(f"{rest[0]}: {problem}. See --help; quote a prompt with spaces.")
    return arguments.prompt


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and " " not in argument


def _write(
    engine: Engine, prompt: str, options: dict[str, Any], checkpoint: Checkpoint, as_json: bool
) -> None:
    from parcae.commands.generation_output import as_dict, print_summary, write_prompt, write_text
    from parcae.infer.sequence import Meter

    request, meter = engine.request(prompt, **options), Meter()
    if not as_json:
        write_prompt(prompt)
    for piece in meter.watch(engine.stream(request)):
        if not as_json:
            write_text(piece.text)
    if as_json:
        import json

        result = {"checkpoint": str(checkpoint.folder), "prompt": prompt}
        result |= as_dict(engine, request, meter)
        print(json.dumps(result, ensure_ascii=False, allow_nan=False))
    else:
        write_text("\n")
        print_summary(engine, request, meter)
