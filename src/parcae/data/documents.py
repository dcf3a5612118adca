"""Tokenised documents by number: what packing and loading know of a corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from parcae.config import ConfigError


class Documents(Protocol):
    """Tokenised documents by number; every document starts with BOS."""

    @property
    def lengths(self) -> np.ndarray:
        """int64, tokens per document, BOS included."""
        ...

    def tokens(self, document: int) -> np.ndarray:
        """The document as uint16 or uint32, BOS first; a view where that is possible."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the content: a loader's state is only good for the documents it came from."""
        ...


class InMemoryDocuments:
    """Documents held in one array: for tests and corpora that fit into memory."""

    def __init__(self, documents: Sequence[Sequence[int] | np.ndarray]) -> None:
        for number, document in enumerate(documents):
            if len(document) == 0:
                raise ConfigError(
                    f"document {number}: it has no token. Start every document with BOS."
                )
        self.lengths = np.array([len(document) for document in documents], dtype=np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        joined = np.concatenate([np.asarray(d, dtype=np.int64) for d in documents] or [np.zeros(0)])
        if len(joined) and (joined.min() < 0 or joined.max() > np.iinfo(np.uint32).max):
            raise ConfigError("documents: a token is negative or does not fit into 32 bits.")
        small = len(joined) == 0 or joined.max() <= np.iinfo(np.uint16).max
        self._tokens = joined.astype(np.uint16 if small else np.uint32)
        self._tokens.flags.writeable = False

    def tokens(self, document: int) -> np.ndarray:
        start = self._starts[document]
        return self._tokens[start : start + self.lengths[document]]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.lengths.tobytes())
        digest.update(self._tokens.astype(np.uint32).tobytes())
        return digest.hexdigest()


class SplitDocuments:
    """The same documents, those longer than `longest` cut into pieces that each start with BOS.

    Best fit uses at most a row of any document and drops the rest; textbooks and novels would be
    dropped almost whole. Cut to `longest = context_length + 1`, they fill rows instead. A piece
    does not tell that it continues another, which is the price.
    """

    def __init__(self, documents: Documents, longest: int) -> None:
        if longest < 2:
            raise ConfigError(f"longest: {longest} leaves no room beside BOS. Use context + 1.")
        self._documents = documents
        self._longest = longest
        text = documents.lengths - 1
        pieces = np.maximum(1, -(-text // (longest - 1)))
        self._document = np.repeat(np.arange(len(text)), pieces)
        first_piece = np.cumsum(pieces) - pieces
        self._start = (np.arange(len(self._document)) - first_piece[self._document]) * (longest - 1)
        self.lengths = 1 + np.minimum(longest - 1, text[self._document] - self._start)

    def tokens(self, document: int) -> np.ndarray:
        whole = self._documents.tokens(int(self._document[document]))
        start, length = int(self._start[document]), int(self.lengths[document])
        if start == 0:
            return whole[:length]
        piece = whole[start : start + length].copy()
        piece[0] = whole[0]
        return piece

    @property
    def fingerprint(self) -> str:
        return f"{self._documents.fingerprint}, split at {self._longest}"
