"""The `parcae` command. Each subcommand is a module of `parcae.commands` with two functions:

    register(subparsers)   adds its parser and sets `run` as the default
    run(arguments) -> int  does the work; heavy imports belong inside

A parser may set more defaults: `takes_settings` for --table.key VALUE, which `run` then finds in
`arguments.settings`, and `lists_settings` for a list of them in its help. With `takes_rest`, `run`
finds there what follows the options, such as a prompt.

A mistake of the user (a wrong key, a missing file) and an error of the system (a full disk) end in
one line on standard error and exit code 2, without a traceback; PARCAE_DEBUG=1 shows the traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from parcae.commands import lm_eval
from parcae.config import ConfigError
from parcae.console import printable
from parcae.files import FileError
from parcae.machine import SpinLimiter
from parcae.registry import import_file, import_from_environment
from parcae.schema import suggest

COMMANDS = {
    "models": ("presets", "show", "export", "import_model"),
    "data": ("data", "tokenizer"),
    "training": ("demo", "plan", "train", "report", "sweep"),
    "inference": ("generate", "depth", "serve"),
    "evaluation": ("eval", "compare", "lm_eval"),
    "scaling laws and experiments": ("fit", "predict", "reproduce"),
}
"""Modules of `parcae.commands`, as `parcae --help` groups them."""
MODEL_COMMANDS = (
    *("show", "plan", "train", "sweep", "report", "compare"),
    *("generate", "serve", "depth", "eval", "export"),
)
"""Commands that read a recipe or open a model, and so may need a user's file: --import FILE."""
WRITING_COMMANDS = ("train", "report", "eval", "sweep", "fit", "reproduce")
"""Commands that write into a folder that somebody else may have made: --follow-links."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = None
    try:
        if argv[:1] == [lm_eval.NAME]:
            import_from_environment()
            return lm_eval.pass_on(argv[1:])
        rest, settings = split_settings(argv)
        arguments, unknown = parser().parse_known_args(rest)
        settings = [*unknown, *settings]
        takes_rest = hasattr(arguments, "takes_settings") or hasattr(arguments, "takes_rest")
        flag = _first_flag(unknown) if takes_rest else next(iter(settings), None)
        if flag is not None:
            raise arguments.parser.unknown_argument(flag)
        if takes_rest:
            arguments.settings = settings
        if hasattr(arguments, "imports"):
            import_from_environment()
            for path in arguments.imports:
                import_file(path)
        with SpinLimiter():
            return arguments.run(arguments)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, OSError) as error:
        if os.environ.get("PARCAE_DEBUG"):
            raise
        message = name_options(_one_line(error), arguments)
        one_line = printable(message).replace("\n", "\\n")
        print(f"parcae: {one_line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("parcae: stopped.", file=sys.stderr)
        return 130


def _one_line(error: ConfigError | OSError) -> str:
    """What is wrong; for an error of the system with its file, if it has one."""
    if isinstance(error, OSError) and not isinstance(error, FileError):
        place = error.filename if error.filename is not None else type(error).__name__
        return f"{place}: {error.strerror or error}.".replace("\n", " ")
    return str(error)


def name_options(message: str, arguments: argparse.Namespace | None) -> str:
    """The message of a library call with options of this command in place of its parameters:
    --task-data for `task_data`, --data.sources for `data.sources`."""
    if arguments is None:
        return message

    def name_option(match: re.Match[str]) -> str:
        option = f"--{match[1].replace('_', '-')}"
        if option in arguments.parser._option_string_actions:
            return option
        is_setting = "." in match[1] and getattr(arguments, "takes_settings", False)
        return f"--{match[1]}" if is_setting else match[0]

    return re.sub(r"`(\w+(?:\.\w+)?)`", name_option, message)


class Parser(argparse.ArgumentParser):
    """Suggests a name for a mistyped one, and prints help where a subcommand is missing.

    Its subparsers are of this class too; the innermost that read something is in `parser`. Options
    cannot be abbreviated: an abbreviation could change its meaning when options are added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def add_subparsers(self, **options: Any) -> Any:
        """As argparse's; without a subcommand the help is printed."""
        self.set_defaults(run=self._show_help)
        return super().add_subparsers(**{**options, "required": False})

    def _show_help(self, arguments: argparse.Namespace) -> int:
        self.print_help()
        return 0

    def format_help(self) -> str:
        text = super().format_help()
        return f"{text}\n{format_settings()}" if self.get_default("lists_settings") else text

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        arguments, unknown = super().parse_known_args(args, namespace)
        if not hasattr(arguments, "parser"):
            arguments.parser = self
        return arguments, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Raise ConfigError, one line without the usage, for a value that its `type` refuses."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            name = next(iter(action.option_strings), str(action.metavar or action.dest))
            expected = {int: "a whole number", float: "a number"}.get(action.type)
            problem = f"expected {expected}, got {arg_string!r}." if expected else error.message
            raise ConfigError(f"{name}: {problem}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if action.option_strings:
            name = action.option_strings[0]
            raise ConfigError(f"{name}: {value!r} is not an option. {suggest(str(value), known)}")
        raise ConfigError(
            f"{value}: no such {str(action.metavar or 'argument').lower()}. "
            f"{suggest(str(value), known)} See {self.prog} --help."
        )

    def unknown_argument(self, argument: str) -> ConfigError:
        """The error for an argument that this parser does not know."""
        if not argument.startswith("-"):
            return ConfigError(f"{argument}: one argument too many. See {self.prog} --help.")
        name = argument.partition("=")[0]
        near = self._nearest_option(name.lstrip("-").replace("_", "-"))
        hint = "" if near is None else f" Did you mean {near}?"
        return ConfigError(f"{name}: no such option.{hint} See {self.prog} --help.")

    def _nearest_option(self, name: str) -> str | None:
        """The option or setting that is meant: --start-from by from, --budget.steps by steps."""
        options = self._option_string_actions.items()
        known = {option.lstrip("-"): action.option_strings[-1] for option, action in options}
        if self.get_default("takes_settings"):
            from parcae.training.settings import all_settings

            keys = sorted((entry.table.key(entry.name) for entry in all_settings()), key=len)
            for key in keys:  # of two with one name the less nested
                known.setdefault(key.rpartition(".")[2].replace("_", "-"), f"--{key}")
        near = difflib.get_close_matches(name, known, n=1)
        near = near or [option for option in known if name in option.split("-")]
        return known[near[0]] if near else None


class Subcommands(argparse._SubParsersAction):
    """Subcommands, of which the help is printed in groups."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.groups: dict[str, list[argparse.Action]] = {}


class GroupedHelp(argparse.HelpFormatter):
    """The help of `parcae`: its commands by group."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, Subcommands):
            return super()._format_action(action)
        self._action_max_length += self._indent_increment  # commands are indented once more
        parts = []
        for group, commands in action.groups.items():
            parts.append(f"\n  {group}:\n")
            self._indent()
            parts += map(super()._format_action, commands)
            self._dedent()
        return "".join(parts).removeprefix("\n")


def parser() -> Parser:
    """The parser of the whole command line."""
    top = Parser(
        prog="parcae",
        description="Train, study and run looped language models.",
        formatter_class=GroupedHelp,
    )
    top.add_argument("--version", action="version", version=_version(), help="print the version")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", action=Subcommands)
    for group, names in COMMANDS.items():
        before = len(subparsers._choices_actions)
        for name in names:
            importlib.import_module(f"parcae.commands.{name}").register(subparsers)
        subparsers.groups[group] = subparsers._choices_actions[before:]
    for choice in subparsers._choices_actions:
        command = subparsers.choices[choice.dest]
        command.description = command.description or f"{choice.help[0].upper()}{choice.help[1:]}."
    for name in MODEL_COMMANDS:
        subparsers.choices[name].add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="FILE",
            help="Python file that registers an injection, sampler, optimiser or exit rule which "
            "the model or recipe uses; may be repeated (default: none)",
        )
    for name in WRITING_COMMANDS:
        subparsers.choices[name].add_argument(
            "--follow-links",
            action="store_true",
            help="write through symbolic links that lead out of the folder of a run or sweep, such "
            "as to `data` or `checkpoints` on another disk (default: refuse them)",
        )
    return top


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--table.key VALUE` and `--table.key=VALUE` from the other arguments."""
    rest, settings = [], []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        name, equals, _ = argument.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(argument)
            continue
        settings.append(argument)
        if not equals and queue and not queue[0].startswith("--"):
            settings.append(queue.pop(0))
    return rest, settings


def format_settings() -> str:
    """Every setting of a recipe by table: name, default, one line of help."""
    from parcae.training.settings import all_settings

    width = max(60, min(120, shutil.get_terminal_size().columns) - 2)
    lines = [
        "settings of a recipe, with their defaults (- for unset)",
        "  In a recipe: key = value below [table]. Here: --table.key VALUE.",
    ]
    table = None
    for entry in all_settings():
        if entry.table is not table:
            table = entry.table
            about = " ".join((table.__doc__ or "").split())
            heading = f"  [{table.table}]  {about}"
            lines += ["", *textwrap.wrap(heading, width, subsequent_indent="    ")]
        unset = entry.default is None or entry.default == ()
        default = "-" if unset else json.dumps(entry.default)
        start = f"    {entry.name:<21} {default:<13} "
        indent = " " * len(f"    {'':<21} {'':<13} ")
        lines += textwrap.wrap(start + entry.help, width, subsequent_indent=indent)
    return "\n".join(lines) + "\n"


def _first_flag(arguments: Sequence[str]) -> str | None:
    """The first unknown argument that was meant as an option, not as a text or a setting."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name != "--" and " " not in name and "." not in name:
            return argument
    return None


def _version() -> str:
    from importlib.metadata import version

    return version("parcae")


if __name__ == "__main__":
    sys.exit(main())
