"""Text on a command line: as it stands, from a file with @, from standard input with -."""

from __future__ import annotations

import sys
from pathlib import Path

from parcae.config import require
from parcae.files import FileError, reading


def read_words(word: str) -> str:
    """The line break that ends a file or a pipe is not part of the text."""
    if word == "-":
        text = _read_input().removesuffix("\n")
    elif word.startswith("@"):
        text = _read_file(word[1:]).removesuffix("\n")
    else:
        text = word
    whole = not any("\ud800" <= letter <= "\udfff" for letter in text)
    require(whole, "text", "it is not UTF-8", "Convert it.")
    return text


def _read_input() -> str:
    binary = getattr(sys.stdin, "buffer", None)
    try:
        return sys.stdin.read() if binary is None else binary.read().decode("utf-8")
    except UnicodeDecodeError:
        raise FileError("standard input: not UTF-8. Convert it.") from None


def _read_file(name: str) -> str:
    try:
        with reading(name):
            return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{name}: not UTF-8. Convert it.") from None
    except FileError as error:
        raise FileError(
            f"{error} (A text that begins with @ itself can come from standard input, with -.)"
        ) from None
