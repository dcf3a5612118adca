"""The texts that perplexity is measured on, as their files hold them."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from parcae.evaluation.items import Fields, read_lines
from parcae.files import FileError, reading

SEPARATORS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}
PUNCTUATION = {f" {mark} ": f"{mark} " for mark in ":;.!?,"}
ENCLOSED = (
    (re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
)
REST = {
    "= = = =": "====",
    "= = =": "===",
    "= =": "==",
    " ° ": "°",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def as_written(text: str) -> str:
    """WikiText's text without the spaces its makers put around signs, by the harness's rules: in
    their order, since each works on what the ones before it left."""
    text = text.replace("s '", "s'")
    text = re.sub("/' [0-9]/", "/'[0-9]/", text)
    for spaced, plain in (SEPARATORS | PUNCTUATION).items():
        text = text.replace(spaced, plain)
    for pattern, plain in ENCLOSED:
        text = pattern.sub(plain, text)
    for spaced, plain in REST.items():
        text = text.replace(spaced, plain)
    return text


def articles(text: str) -> Iterator[str]:
    """WikiText's file cut before every line ` = Title = `; subtitles have more signs."""
    lines: list[str] = []
    for line in text.split("\n"):
        title = line.replace("= = =", "===").replace("= =", "==").strip()
        if title.startswith("= ") and title.endswith(" ="):
            if (article := "\n".join(lines)).strip():
                yield article
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def read_wikitext(path: Path) -> list[str]:
    """Its articles, as they stand in the file."""
    try:
        with reading(path), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as stream:
            text = stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 ({error}). Get the raw version of WikiText.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileError(f"{path}: not a whole gzip file ({error}). Get it again.") from None
    found = list(articles(text))
    if not any(article.strip() for article in found):
        raise FileError(f"{path}: it holds no text. Get it again.")
    return found


def read_passages(path: Path) -> list[tuple[str, str]]:
    """LAMBADA: what stands before the last word, and the word."""
    return read_lines(path, _passage)


def _passage(fields: Fields) -> tuple[str, str]:
    word = fields.text("continuation").strip(" ")  # a line may end before it, which counts
    if not word.strip():
        raise fields.error("there is nothing to predict", "continuation")
    return fields.text("context"), word
