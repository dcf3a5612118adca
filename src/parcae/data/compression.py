"""How short tokenizers make a text, side by side: bytes per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from parcae.data.corpus import SourceFile, bytes_read, read_documents
from parcae.data.readers import Reading
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError


@dataclass(frozen=True)
class Row:
    source: str
    text_bytes: int
    tokens: tuple[int, ...]

    @property
    def bytes_per_token(self) -> tuple[float, ...]:
        return tuple(self.text_bytes / count for count in self.tokens)


def compare(
    tokenizers: Sequence[Tokenizer],
    sources: Iterable[tuple[str, Sequence[SourceFile]]],
    reading: Reading,
    show: Callable[[str, float], None] = lambda _words, _done: None,
) -> list[Row]:
    """One row per source, and one for all of them together."""
    rows: list[Row] = []
    done = 0.0
    for name, files in sources:
        read_so_far = bytes_read(files)
        text_bytes = 0
        counts = [0] * len(tokenizers)
        for document in read_documents(files, reading):
            text_bytes += len(document.text.encode())
            for place, tokenizer in enumerate(tokenizers):
                counts[place] += len(tokenizer.encode(document.text))
            show(f"{name} (MiB)", (done + read_so_far(document)) / 2**20)
        if not text_bytes:
            raise FileError(f"{name}: no text to compare on. Name another source.")
        done += sum(file.bytes for file in files)
        rows.append(Row(name, text_bytes, tuple(counts)))
    if len(rows) > 1:
        sums = tuple(sum(counts) for counts in zip(*(row.tokens for row in rows), strict=True))
        rows.append(Row("all", sum(row.text_bytes for row in rows), sums))
    return rows
