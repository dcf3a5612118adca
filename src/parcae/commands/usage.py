"""How a command line is read: what is mistyped gets a suggestion, what is left away gets help."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from parcae.config import ConfigError
from parcae.recipe import suggest


class Parser(argparse.ArgumentParser):
    """Its subparsers are of this kind too. The innermost that read something is in `parser`.
    Options are written out: an abbreviation would change its meaning when options are added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def add_subparsers(self, **settings: Any) -> Any:
        """Where no command follows, the help lists those there are."""
        self.set_defaults(run=self._show_help)
        return super().add_subparsers(**{**settings, "required": False})

    def _show_help(self, arguments: argparse.Namespace) -> int:
        self.print_help()
        return 0

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if not hasattr(found, "parser"):
            found.parser = self
        return found, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """A value that its `type` refuses is an error of one line, like every other."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            name = "/".join(action.option_strings) or str(action.metavar or action.dest)
            raise ConfigError(f"{name}: {error.message}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if action.option_strings:
            name = "/".join(action.option_strings)
            raise ConfigError(f"{name}: {value!r} is not an option. {suggest(str(value), known)}")
        raise ConfigError(
            f"{value}: no such {str(action.metavar or 'word').lower()}. "
            f"{suggest(str(value), known)} See {self.prog} --help."
        )

    def refuse(self, word: str) -> ConfigError:
        """The error for a word that means nothing to this parser."""
        if not word.startswith("-"):
            return ConfigError(f"{word}: one word too many. See {self.prog} --help.")
        name = word.partition("=")[0]
        known = {option.lstrip("-"): option for option in self._option_string_actions}
        near = difflib.get_close_matches(name.lstrip("-"), known, n=1)
        hint = f" Did you mean {known[near[0]]}?" if near else ""
        return ConfigError(f"{name}: no such option.{hint} See {self.prog} --help.")


def first_flag(words: Sequence[str]) -> str | None:
    """The first of the words nobody knew that was meant as a flag, not as a text or a setting."""
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name != "--" and " " not in name and "." not in name:
            return word
    return None
