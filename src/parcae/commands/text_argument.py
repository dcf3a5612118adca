"""Text as a command-line argument: the text itself, @FILE, or - for standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from parcae.config import require
from parcae.files import FileError, reading


def read_text(argument: str) -> str:
    """The text of an argument, without the line break that ends a file or standard input."""
    if argument == "-":
        text = _read_input().removesuffix("\n")
    elif argument.startswith("@"):
        text = _read_file(argument[1:]).removesuffix("\n")
    else:
        text = argument
    valid = not any("\ud800" <= character <= "\udfff" for character in text)
    require(valid, "text", "it is not UTF-8", "Convert it to UTF-8.")
    return text


def _read_input() -> str:
    binary = getattr(sys.stdin, "buffer", None)
    try:
        return sys.stdin.read() if binary is None else binary.read().decode("utf-8")
    except UnicodeDecodeError:
        raise FileError("standard input: not UTF-8. Convert it to UTF-8.") from None


def _read_file(name: str) -> str:
    try:
        with reading(name, pipe=True):
            return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{name}: not UTF-8. Convert it to UTF-8.") from None
    except FileError as error:
        raise FileError(
            f"{error} (Pass a text that begins with @ through standard input, with -.)"
        ) from None
