"""The `parcae` command. Each subcommand is a module of `parcae.commands` with two functions:

    register(subparsers)   adds its parser and sets `run` as the default
    run(arguments) -> int  does the work; heavy imports belong inside

Mistakes of the user (a wrong key, a missing file) end in one line on standard error and exit
code 2, without a traceback; `PARCAE_DEBUG=1` shows it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from parcae.commands import lm_eval
from parcae.commands.usage import Parser, first_flag
from parcae.config import ConfigError
from parcae.files import FileError

COMMANDS = (
    "presets",
    "show",
    "demo",
    "data",
    "tokenizer",
    "plan",
    "train",
    "report",
    "generate",
    "depth",
    "eval",
    "compare",
    "lm_eval",
    "sweep",
    "fit",
    "predict",
)


def parser() -> Parser:
    top = Parser(prog="parcae", description="Train, study and run looped language models.")
    top.add_argument("--version", action="version", version=_version())
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"parcae.commands.{name}").register(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == [lm_eval.NAME]:
            return lm_eval.pass_on(argv[1:])
        words, settings = split_settings(argv)
        arguments, unknown = parser().parse_known_args(words)
        settings = [*unknown, *settings]
        takes_settings = getattr(arguments, "takes_settings", False)
        flag = first_flag(unknown) if takes_settings else next(iter(settings), None)
        if flag is not None:
            raise arguments.parser.refuse(flag)
        if takes_settings:
            arguments.settings = settings
        return arguments.run(arguments)
    except (ConfigError, FileError) as error:
        if os.environ.get("PARCAE_DEBUG"):
            raise
        print(f"parcae: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("parcae: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take out `--table.key VALUE` and `--table.key=VALUE`, wherever they stand."""
    rest, settings = [], []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(word)
            continue
        settings.append(word)
        if not equals and queue and not queue[0].startswith("--"):
            settings.append(queue.pop(0))
    return rest, settings


def _version() -> str:
    from importlib.metadata import version

    return version("parcae")


if __name__ == "__main__":
    sys.exit(main())
