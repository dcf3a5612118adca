"""Train a tokenizer on files, and compare tokenizers by their bytes per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcae.config import require
from parcae.data.readers import bytes_read, read_documents
from parcae.data.sources import ReadOptions, find_files
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError
from parcae.schema import require_range

CHARACTERS = 2_000_000_000
DOCUMENT_CAP = 10_000

Report = Callable[[str, float, float], None]
"""Called with an activity, the bytes of the sources processed, and the bytes of all sources."""


def _no_report(_activity: str, _done: float, _total: float) -> None:
    pass


@dataclass
class TextUse:
    """How much of the texts a tokenizer is trained on; counted while they are read."""

    document_cap: int
    documents: int = 0
    characters: int = 0
    """Characters of the texts that are used."""
    documents_cut: int = 0
    characters_cut: int = 0
    """Beyond `document_cap`, in the documents that were read."""
    ended_early: bool = False
    """Whether the limit of all characters was reached."""


def train_tokenizer(
    sources: Sequence[str | Path],
    size: int = 32_768,
    *,
    characters: float = CHARACTERS,
    document_cap: int = DOCUMENT_CAP,
    options: ReadOptions | None = None,
    report: Report = _no_report,
    report_use: Callable[[TextUse], None] = lambda _use: None,
) -> Tokenizer:
    """Train a tokenizer on files, folders, globs or `builtin`.

    `size` is the number of entries, special tokens included. At most `characters` characters are
    read, of each document at most the first `document_cap`; 0 means the whole document.
    `report_use` is called once, with what these limits left of the text.
    """
    files = find_files(sources)
    total = sum(file.bytes for file in files)
    read_until = bytes_read(files)

    def texts() -> Iterator[str]:
        for document in read_documents(files, options):
            report("reading", read_until(document), total)
            yield document.text

    use = TextUse(document_cap)
    tokenizer = Tokenizer.train(
        limit_characters(texts(), characters, document_cap, use),
        size,
        on_merge=lambda: report("merging", total, total),
    )
    report_use(use)
    return tokenizer


def limit_characters(
    texts: Iterable[str], characters: float, document_cap: int, use: TextUse | None = None
) -> Iterator[str]:
    """The first `document_cap` characters of each text (0: all of it), `characters` in total.

    `use` counts what is used and what is cut.
    """
    require_range("characters", characters, f"The default is {CHARACTERS:,}.", at_least=1)
    require(
        document_cap >= 0,
        "document_cap",
        f"{document_cap} is negative",
        "Use 0 for whole documents.",
    )
    return _heads(texts, int(characters), use or TextUse(document_cap))


def _heads(texts: Iterable[str], characters: int, use: TextUse) -> Iterator[str]:
    for text in texts:
        remaining = characters - use.characters
        cut = max(0, len(text) - use.document_cap) if use.document_cap else 0
        head = text[: min(remaining, len(text) - cut)]
        use.documents += bool(text)
        use.characters += len(head)
        use.documents_cut += cut > 0
        use.characters_cut += cut
        yield head
        if use.characters >= characters:
            use.ended_early = True
            return


@dataclass(frozen=True)
class SourceTokens:
    """The size of one source in bytes and in the tokens of each tokenizer."""

    source: str
    text_bytes: int
    tokens: tuple[int, ...]

    @property
    def bytes_per_token(self) -> tuple[float, ...]:
        return tuple(self.text_bytes / count for count in self.tokens)


@dataclass(frozen=True)
class TokenizerComparison:
    """Bytes per token of several tokenizers on several sources."""

    names: tuple[str, ...]
    tokenizers: tuple[Tokenizer, ...]
    sources: tuple[SourceTokens, ...]
    """One entry per source, and one named `all` if there are several."""

    def table(self) -> list[dict[str, Any]]:
        """One row per tokenizer and source."""
        return [
            {
                "tokenizer": name,
                "vocab_size": tokenizer.vocab_size,
                "source": source.source,
                "text_bytes": source.text_bytes,
                "tokens": source.tokens[index],
                "bytes_per_token": source.bytes_per_token[index],
            }
            for index, (name, tokenizer) in enumerate(zip(self.names, self.tokenizers, strict=True))
            for source in self.sources
        ]


def compare_tokenizers(
    tokenizers: Sequence[Tokenizer | str | Path],
    sources: Sequence[str | Path],
    *,
    options: ReadOptions | None = None,
    report: Report = _no_report,
) -> TokenizerComparison:
    """Measure the bytes per token of each tokenizer on each source."""
    loaded = tuple(t if isinstance(t, Tokenizer) else Tokenizer.load(t) for t in tokenizers)
    names = tuple(t.name if isinstance(t, Tokenizer) else str(t) for t in tokenizers)
    files_of_source = [(str(source), find_files([source])) for source in sources]
    total = sum(file.bytes for _, files in files_of_source for file in files)
    rows: list[SourceTokens] = []
    done = 0
    for source, files in files_of_source:
        read_until = bytes_read(files)
        text_bytes = 0
        counts = [0] * len(loaded)
        for document in read_documents(files, options):
            text_bytes += len(document.text.encode())
            for index, tokenizer in enumerate(loaded):
                counts[index] += len(tokenizer.encode(document.text))
            report(source, done + read_until(document), total)
        if not text_bytes:
            raise FileError(f"{source}: contains no text. Name another source.")
        done += sum(file.bytes for file in files)
        rows.append(SourceTokens(source, text_bytes, tuple(counts)))
    if len(rows) > 1:
        sums = tuple(sum(counts) for counts in zip(*(row.tokens for row in rows), strict=True))
        rows.append(SourceTokens("all", sum(row.text_bytes for row in rows), sums))
    return TokenizerComparison(names, loaded, tuple(rows))
