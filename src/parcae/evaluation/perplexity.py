"""Loss of text, as lm-evaluation-harness measures it: WikiText, LAMBADA, and files of texts.

A text is cut into windows whose predictions do not overlap: the first is predicted from BOS alone,
every other one from the token before it, and the last one from as much text as fits the context. A
passage that is too long for the context loses tokens on the left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from parcae.config import ConfigError, require
from parcae.data.readers import read_documents
from parcae.data.sources import ReadOptions, find_files
from parcae.evaluation.jobs import (
    DataFile,
    Job,
    PromptJob,
    Record,
)
from parcae.evaluation.metrics import (
    bits_per_byte,
    mean,
    perplexity,
    standard_error,
    sums,
)
from parcae.evaluation.prompts import Answer, Prompt, Span, Window, continuations, windows
from parcae.evaluation.results import Samples, job_result
from parcae.evaluation.scorer import Scorer
from parcae.evaluation.tasks import Fields, find, read_content, read_lines
from parcae.files import FileError, nan_to_none

LAMBADA_FILE = "language_understanding/lambada_openai.jsonl"
WIKITEXT_FILES = tuple(
    f"{folder}wiki.test.raw" for folder in ("corpora/wikitext2_raw/", "wikitext-2-raw/", "")
)


@dataclass(frozen=True)
class TextSuite:
    """A suite of one job; None where its data is missing."""

    job: Job | None

    @property
    def jobs(self) -> list[Job]:
        return [] if self.job is None else [self.job]

    def result(self, samples: Samples, loops: Sequence[int]) -> dict[str, Any]:
        if self.job is None:
            return {"by_loops": {str(depth): None for depth in loops}}
        return job_result(self.job, samples, loops)


def open_lambada(folder: Path, limit: int | None) -> TextSuite:
    path = find(folder, LAMBADA_FILE)
    if path is None:
        return TextSuite(None)
    return TextSuite(Passages("lambada", read_passages(path)[:limit], DataFile(path, "test")))


def open_wikitext(folder: Path, limit: int | None, scorer: Scorer) -> TextSuite:
    paths = (find(folder, name) for name in WIKITEXT_FILES)
    path = next((path for path in paths if path is not None), None)
    if path is None:
        return TextSuite(None)
    articles = read_wikitext(path)[:limit]
    texts = [detokenise(article) for article in articles]
    return TextSuite(RunningText("wikitext", texts, articles, DataFile(path, "test"), scorer))


def open_texts(
    path: str | Path, limit: int | None, scorer: Scorer, options: ReadOptions | None = None
) -> TextSuite:
    """The suite `val` on a file: every document, or the first `limit`."""
    options = options or ReadOptions()
    files = find_files([path])
    if len(files) != 1:
        raise ConfigError(f"val-data: {path} stands for {len(files)} files. Name one file.")
    texts = [document.text for document in islice(read_documents(files, options), limit)]
    source = DataFile(files[0].path, "held out", options=options)
    return TextSuite(RunningText("val", texts, texts, source, scorer))


class Passages(PromptJob):
    """LAMBADA: the last word of each passage."""

    def __init__(self, name: str, passages: Sequence[tuple[str, str]], source: DataFile) -> None:
        self.name, self.passages, self.source = name, passages, source

    def __len__(self) -> int:
        return len(self.passages)

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        context, word = self.passages[index]
        return continuations(context, [f" {word}"], scorer)

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        (answer,) = answers
        return {"nats": sums(answer), "greedy": answer.is_greedy(), "cut": prompt.is_cut}

    def summarise(self, records: Sequence[Record], depth_index: int) -> dict[str, Any]:
        right = [float(record["greedy"][depth_index]) for record in records]
        nats = mean([record["nats"][depth_index] for record in records])
        return {
            "accuracy": mean(right),
            "standard_error": standard_error(right),
            "perplexity": nan_to_none(perplexity(nats)),
        }


class RunningText(PromptJob):
    """Whole documents. An item is a window; the words and bytes of a document count with its first
    window."""

    unit = ("window", "windows")

    def __init__(
        self,
        name: str,
        documents: Sequence[str],
        counted: Sequence[str],
        source: DataFile,
        scorer: Scorer,
    ) -> None:
        """`documents` are what the model reads, `counted` the texts whose words and bytes count."""
        self.name, self.source = name, source
        bos = scorer.bos
        require(bos is not None, "tokenizer", "it has no BOS or EOS token", "Use another model.")
        assert bos is not None
        self.windows: list[tuple[int, Window]] = [
            (number, window)
            for number, text in enumerate(documents)
            for window in windows(scorer.encode(text), bos, scorer.context_length)
        ]
        if not self.windows:
            raise FileError(f"{source.path}: contains no text. Name another file.")
        self.words = [len(re.split(r"\s+", text)) for text in counted]
        self.bytes = [len(text.encode()) for text in counted]

    def __len__(self) -> int:
        return len(self.windows)

    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        tokens, scored = self.windows[index][1]
        count = len(tokens)
        return Prompt((tokens,), (Span(count - scored, count),), (count,))

    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        document, window = self.windows[index]
        is_first = index == 0 or self.windows[index - 1][0] != document
        return {
            "document": document,
            "nats": sums(answers[0]),
            "tokens": window.scored,
            "words": self.words[document] if is_first else 0,
            "bytes": self.bytes[document] if is_first else 0,
        }

    def describe(self, records: Sequence[Record]) -> dict[str, Any]:
        return {**super().describe(records), "documents": len(self.bytes)}

    def summarise(self, records: Sequence[Record], depth_index: int) -> dict[str, Any]:
        nats = math.fsum(record["nats"][depth_index] for record in records)
        tokens, words, size = (
            sum(record[unit] for record in records) for unit in ("tokens", "words", "bytes")
        )
        return {
            "loss": nats / tokens,
            "perplexity": nan_to_none(perplexity(nats / tokens)),
            "word_perplexity": nan_to_none(perplexity(nats / words)),
            "byte_perplexity": nan_to_none(perplexity(nats / size)),
            "bits_per_byte": bits_per_byte(nats, size),
        }


SEPARATORS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}
PUNCTUATION = {f" {mark} ": f"{mark} " for mark in ":;.!?,"}
ENCLOSED = (
    (re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
)
OTHERS = {
    "= = = =": "====",
    "= = =": "===",
    "= =": "==",
    " ° ": "°",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def detokenise(text: str) -> str:
    """WikiText without the spaces around its punctuation, by the rules of the harness in their
    order: each works on what the ones before it left."""
    text = text.replace("s '", "s'")
    text = re.sub("/' [0-9]/", "/'[0-9]/", text)
    for spaced, plain in (SEPARATORS | PUNCTUATION).items():
        text = text.replace(spaced, plain)
    for pattern, plain in ENCLOSED:
        text = pattern.sub(plain, text)
    for spaced, plain in OTHERS.items():
        text = text.replace(spaced, plain)
    return text


def split_articles(text: str) -> Iterator[str]:
    """WikiText's file, cut before every line ` = Title = `; subtitles have more signs."""
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
    """The articles of WikiText, as the file has them."""
    try:
        text = read_content(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: not UTF-8 ({error}). Download the raw version of WikiText."
        ) from None
    articles = list(split_articles(text))
    if not any(article.strip() for article in articles):
        raise FileError(f"{path}: contains no text. Download it again.")
    return articles


def read_passages(path: Path) -> list[tuple[str, str]]:
    """LAMBADA: the text before the last word, and the word, of each passage."""
    return read_lines(path, _passage)


def _passage(fields: Fields) -> tuple[str, str]:
    word = fields.text("continuation").strip(" ")  # a line break before the word counts
    if not word.strip():
        raise fields.error("nothing to predict", "continuation")
    return fields.text("context"), word
