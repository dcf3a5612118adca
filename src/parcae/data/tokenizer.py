"""The tokenizer: byte-level BPE in a standard `tokenizer.json`.

    tokenizer = Tokenizer.train(texts, size=32_768)
    tokenizer.save("tokenizer.json")
    ids = Tokenizer.load("tokenizer.json").encode("any text")

Ids 0, 1 and 2 are `<|bos|>`, `<|eos|>` and `<|pad|>` for every vocabulary size; the 256 bytes
follow, then the merges. Text is not normalised, so decoding restores it exactly. A special token's
name in the text is encoded as ordinary text unless `allow_special=True`.

Long texts are encoded in pieces, which bounds memory and lets one document use all cores. Pieces
are cut only where the split never joins characters, so the ids are those of the whole text. The
exception is a run of `LONGEST_PIECE` characters without such a position, which is cut there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from parcae.config import MAX_VOCABULARY, ConfigError, require
from parcae.data import TOKENIZER_FILE
from parcae.data.readers import Document
from parcae.data.tokenizer_growth import (
    LENGTHENED,
    check_growth,
    check_length,
    check_texts,
    usual_length,
)
from parcae.files import FileError, atomic_path, read_json, read_text, reading
from parcae.schema import shorten

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
SMALLEST_SIZE = 256 + len(SPECIALS)

CONTRACTION = r"'(?i:[sdmt]|ll|ve|re)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
NUMBER = r"\p{N}{1,2}"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LINE_BREAK = r"\s*[\r\n]+"
SPACE_BEFORE_WORD = r"\s+(?!\S)"
SPLIT = "|".join((CONTRACTION, WORD, NUMBER, PUNCTUATION, LINE_BREAK, SPACE_BEFORE_WORD, r"\s+"))

SHORT_TEXT = "a  B é, aaﷺ12 漢字\n\n bﷺ中aé"
USUAL_PIECE = 16_384
LONGEST_PIECE = 131_072
BATCH_CHARACTERS = 1 << 20
CHARACTERS_AHEAD = 3 << 20
ITEM_CHARACTERS = 200
"""Added to the length of each text: the memory of even an empty one, in characters."""
SAFE_CUT = re.compile(r"(?<=\S)(?= )|(?<=\n)(?=\S)")
"""Before a space that follows a visible character, or after a line break: `SPLIT` never joins
characters across these, and looks neither back over the first nor ahead over the second."""

T = TypeVar("T")
R = TypeVar("R")


def _byte_letters() -> dict[str, int]:
    """The byte-level alphabet: printable bytes are written as themselves, the others as letters
    from U+0100 in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()
BOS_NAMES = ("<|bos|>", "<|begin_of_text|>", "<s>", "<|endoftext|>", "<|startoftext|>")


class Tokenizer:
    """A byte-level or any other `tokenizer.json`, with what training and evaluation need."""

    def __init__(self, content: str, name: str = "tokenizer") -> None:
        self.name = name
        self.content = content = _without_dropout(content, name)
        self._plain = _whole_texts(content)
        self._plain.encode_special_tokens = True  # specials in text are encoded as text
        self._special = _whole_texts(content)
        self._growth = check_growth(self._plain)
        _try(self._plain)
        self._cuts_safely = _cuts_safely(json.loads(content))
        if not self._plain.get_vocab_size(with_added_tokens=True):
            raise ValueError("the vocabulary is empty")
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"id {self.vocab_size - 1:,} is above {MAX_VOCABULARY - 1:,}")
        if missing := self._missing_bytes():
            raise ValueError(f"{missing} of the 256 bytes are missing, so text would be lost")

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocab_size:,} entries, sha256 {self.sha256[:12]})"

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        size: int = 32_768,
        *,
        on_merge: Callable[[], None] | None = None,
    ) -> Tokenizer:
        """Train a vocabulary of `size` entries, special tokens included.

        The same texts in the same order give the same tokenizer, byte for byte. `on_merge` is
        called when all texts are read and merging starts. If the texts are too few for `size`,
        `vocab_size` is smaller.
        """
        require(
            size >= SMALLEST_SIZE,
            "size",
            f"{size} is too small",
            f"It must be >= {SMALLEST_SIZE}: 256 bytes and {len(SPECIALS)} special tokens.",
        )
        require(
            size <= MAX_VOCABULARY,
            "size",
            f"{size:,} entries are too many",
            f"It must be at most {MAX_VOCABULARY:,}.",
        )
        blank = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
        blank.pre_tokenizer = _pre_tokenizer()  # type: ignore[assignment]
        blank.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )

        def pieces() -> Iterator[str]:
            any_text = False
            for text in texts:
                any_text = any_text or bool(text)
                yield from safe_pieces(text)
            if not any_text:
                raise ConfigError("the training texts are empty. Name a source with text.")
            if on_merge:
                on_merge()

        blank.train_from_iterator(pieces(), trainer)
        return cls(blank.to_str(pretty=True), "tokenizer")

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Tokenizer:
        """A vocabulary of words, in the order of their ids; texts have spaces between them."""
        vocabulary = {word: number for number, word in enumerate(words)}
        plain = tokenizers.Tokenizer(models.WordLevel(vocabulary))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
        plain.add_special_tokens([word for word in words if word in BOS_NAMES])
        return cls(plain.to_str(pretty=True), "tokenizer")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a `tokenizer.json`, or a folder with one, or with `vocab.json` and `merges.txt`."""
        path = Path(path)
        with reading(path):
            is_folder = path.is_dir()
            in_two_files = is_folder and not (path / TOKENIZER_FILE).exists()
            if in_two_files and (path / "merges.txt").exists():
                content = _read_gpt2_layout(path)
                try:
                    with _no_panic():
                        return cls(content, path.name)
                except Exception as error:  # tokenizers raises bare Exception
                    raise FileError(f"{path}: not a valid vocabulary ({_reason(error)}).") from None
        path = path / TOKENIZER_FILE if is_folder else path
        try:
            with _no_panic():
                return cls(read_text(path), path.stem)
        except FileError:
            if path.exists():
                raise
            raise FileError(
                f"{path}: no such tokenizer. Create one with `parcae tokenizer train`."
            ) from None
        except Exception as error:  # tokenizers raises bare Exception
            raise FileError(
                f"{path}: not a valid tokenizer.json ({_reason(error)}). Use another one."
            ) from None

    def save(self, path: str | Path) -> None:
        with atomic_path(path) as temporary:
            temporary.write_text(self.content, encoding="utf-8")

    @cached_property
    def sha256(self) -> str:
        """sha256 of the content; whitespace and key order in the file do not matter."""
        canonical = json.dumps(json.loads(self.content), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: the rows that an embedding table needs."""
        return max(self._plain.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def token_dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id, little-endian."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """The underlying `tokenizers.Tokenizer`, for example for its `DecodeStream`:

        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=False)
        text = stream.step(tokenizer.backend_tokenizer, token)
        """
        return self._plain

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are sequences of bytes."""
        return (json.loads(self.content).get("decoder") or {}).get("type") == "ByteLevel"

    def _missing_bytes(self) -> int:
        """Bytes missing in a byte-level vocabulary; the library drops them without a warning."""
        if not self.is_byte_level or json.loads(self.content)["model"].get("unk_token"):
            return 0
        return len(BYTE_OF_LETTER.keys() - self._plain.get_vocab(with_added_tokens=True).keys())

    @cached_property
    def bos(self) -> int:
        """The id every document starts with."""
        for name in BOS_NAMES:
            if (number := self._plain.token_to_id(name)) is not None:
                return number
        raise ConfigError(
            f"{self.name}: no token that starts documents; expected {', '.join(BOS_NAMES)}. "
            "Train a tokenizer with `parcae tokenizer train`."
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a text, without BOS."""
        encoder = self._special if allow_special else self._plain
        parts = self._encode_batch(encoder, list(self._pieces(text)))
        return [number for ids in parts for number in ids]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """BOS and the ids of each text, encoded on all cores."""
        bos = np.array([self.bos], self.token_dtype)
        parts = [[bos] for _ in texts]
        pieces = (
            (number, piece) for number, text in enumerate(texts) for piece in self._pieces(text)
        )
        for batch in _batches(pieces, lambda numbered: len(numbered[1])):
            encoded = self._encode_batch(self._plain, [piece for _, piece in batch])
            for (number, _), ids in zip(batch, encoded, strict=True):
                parts[number].append(np.array(ids, bos.dtype))
        return [np.concatenate(part) for part in parts]

    def _encode_batch(
        self, encoder: tokenizers.Tokenizer, pieces: list[str]
    ) -> Iterator[list[int]]:
        """The ids of each piece; of so few at a time that memory is bounded."""
        try:
            with _no_panic():
                check_texts(encoder, self._growth, pieces)
                left = usual_length(sum(map(len, pieces)))
                for some in _batches(pieces, len, min(BATCH_CHARACTERS, LENGTHENED / self._growth)):
                    for encoding in encoder.encode_batch_fast(some, add_special_tokens=False):
                        left -= len(encoding.ids)
                        check_length(left)
                        yield encoding.ids
        except Exception as error:  # a pattern in the file that never ends on some texts
            words = encoder.get_vocab(with_added_tokens=True)
            unknown = next((w for piece in pieces for w in piece.split() if w not in words), None)
            if isinstance(encoder.model, models.WordLevel) and unknown:
                known = ", ".join(sorted(words, key=lambda word: words[word])[:24])
                raise FileError(
                    f"{self.name}: {shorten(unknown)} is no token. Tokens: {known}, ..."
                ) from None
            raise FileError(
                f"{self.name}: the tokenizer cannot encode this text ({_reason(error)}). "
                "Use another tokenizer."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special tokens are written by name; invalid UTF-8 becomes U+FFFD."""
        numbers = [int(number) for number in ids]
        with self._decoding():
            return self._plain.decode(numbers, skip_special_tokens=False)

    def decode_stream(self, after: Sequence[int] = ()) -> Callable[[int], str]:
        """A function that takes ids one at a time and returns the text each adds, in whole
        characters, for any kind of tokenizer. `after`: ids before them."""
        stream = decoders.DecodeStream(ids=list(after), skip_special_tokens=False)

        def step(number: int) -> str:
            with self._decoding():
                return stream.step(self._plain, number) or ""

        return step

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            with _no_panic():
                yield
        except Exception as error:  # tokenizers raises bare Exception
            raise FileError(
                f"{self.name}: the tokenizer cannot decode these tokens ({_reason(error)}). "
                "Use another tokenizer."
            ) from None

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text per id, 0 for special tokens: int32, indexed by id."""
        if not self.is_byte_level:
            raise ConfigError(
                f"{self.name}: not a byte-level tokenizer, so bytes per token are undefined."
            )
        table = np.zeros(self.vocab_size, np.int32)
        for token, number in self._plain.get_vocab(with_added_tokens=False).items():
            table[number] = len(token)  # the byte alphabet has one letter per byte
        for number, token in self._plain.get_added_tokens_decoder().items():
            table[number] = 0 if token.special else len(token.content.encode())
        return table

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id, indexed by id; special tokens by name. A single entry may be a
        part of a character."""
        table = [b""] * self.vocab_size
        for token, number in self._plain.get_vocab(with_added_tokens=True).items():
            table[number] = self._bytes_of(token)
        return table

    def _bytes_of(self, token: str) -> bytes:
        if self.is_byte_level and all(letter in BYTE_OF_LETTER for letter in token):
            return bytes(BYTE_OF_LETTER[letter] for letter in token)
        return token.encode()

    def _pieces(self, text: str) -> Iterable[str]:
        return safe_pieces(text) if self._cuts_safely else [text]


@contextmanager
def _no_panic() -> Iterator[None]:
    """Raise ValueError instead of a panic of the library, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from None


_SILENT = threading.Lock()


@contextmanager
def _no_printed_panic() -> Iterator[None]:
    """As `_no_panic`, without the lines that the library prints: they go around Python. So does
    what other threads print meanwhile; only for short calls."""
    if sys.__stderr__ is None:  # there is no standard error; its number may be any file's
        with _no_panic():
            yield
        return
    with _SILENT, open(os.devnull, "wb") as nowhere:
        original = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            with _no_panic():
                yield
        finally:
            os.dup2(original, 2)
            os.close(original)


def safe_pieces(text: str, usual: int = USUAL_PIECE, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """The text in pieces whose ids together are the ids of the whole."""
    start = 0
    while len(text) - start > usual:
        cut = SAFE_CUT.search(text, start + usual, start + longest)
        end = cut.start() if cut else start + longest
        if end >= len(text):
            break
        yield text[start:end]
        start = end
    yield text[start:]


def map_batches(
    function: Callable[[list[Document]], list[R]], documents: Iterable[Document]
) -> Iterator[list[R]]:
    """Apply `function` to batches of documents in two threads, and yield the results in order.

    At most `CHARACTERS_AHEAD` characters are read ahead, which bounds memory; a batch with a very
    long document is waited for before more is read. `tokenizers` uses threads of its own.
    """
    pending: deque[tuple[Future[list[R]], int]] = deque()
    ahead = 0
    with ThreadPoolExecutor(2) as pool:
        try:
            for batch in _batches(documents, lambda document: len(document.text)):
                pending.append((pool.submit(function, batch), _characters(batch)))
                ahead += pending[-1][1]
                del batch
                while ahead > CHARACTERS_AHEAD:
                    ahead -= pending[0][1]
                    yield pending.popleft()[0].result()
            while pending:
                yield pending.popleft()[0].result()
        finally:
            for future, _ in pending:
                future.cancel()


def _characters(batch: list[Document]) -> int:
    return sum(len(document.text) + ITEM_CHARACTERS for document in batch)


def _batches(
    items: Iterable[T], length: Callable[[T], int], most: float = BATCH_CHARACTERS
) -> Iterator[list[T]]:
    """Lists of about `most` characters: an encoding takes a hundred times the memory
    of its ids, so few may exist at once."""
    batch: list[T] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += length(item) + ITEM_CHARACTERS
        del item
        if characters >= most:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _pre_tokenizer() -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _whole_texts(content: str) -> tokenizers.Tokenizer:
    """A tokenizer without the truncation, padding and templates that a file may ask for."""
    with _no_printed_panic():
        tokenizer = tokenizers.Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.post_processor = None  # type: ignore[assignment]
    return tokenizer


def _try(tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ValueError if it panics on a short text."""
    with _no_printed_panic(), suppress(Exception):  # an error may depend on the text
        ids = tokenizer.encode(SHORT_TEXT, add_special_tokens=False).ids
        for some in (ids, ids[:1], []):
            tokenizer.decode(some, skip_special_tokens=False)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _without_dropout(content: str, name: str) -> str:
    """The content, with the dropout of BPE, which makes encodings random, switched off."""
    tree = json.loads(content)
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or not model.get("dropout"):
        return content
    warnings.warn(
        f"{name}: encodings with a BPE dropout of {model['dropout']} are random; it is turned off",
        stacklevel=2,
    )
    return json.dumps({**tree, "model": {**model, "dropout": None}}, ensure_ascii=False)


def _cuts_safely(tree: dict[str, Any]) -> bool:
    """Whether it splits as `SPLIT` does, and nothing else looks across a `SAFE_CUT`."""
    expected = json.loads(_pre_tokenizer().__getstate__())
    only_specials = all(token["special"] for token in tree.get("added_tokens", ()))
    return (
        tree.get("normalizer") is None and tree.get("pre_tokenizer") == expected and only_specials
    )


def _read_gpt2_layout(folder: Path) -> str:
    """GPT-2's `vocab.json` and `merges.txt` as the content of a `tokenizer.json`."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    read_text(merges, errors="replace")  # an error of its own for a file that cannot be read
    ids = read_json(vocabulary)
    if not isinstance(ids, dict) or not all(  # the library takes memory for every id up to the last
        isinstance(token, int) and 0 <= token < MAX_VOCABULARY for token in ids.values()
    ):
        raise FileError(f"{vocabulary}: ids must be from 0 to {MAX_VOCABULARY - 1:,}.")
    try:
        with _no_printed_panic():
            tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
            tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
            tokenizer.add_special_tokens(["<|endoftext|>"])
            return tokenizer.to_str()
    except Exception as error:  # tokenizers raises bare Exception
        raise FileError(
            f"{folder}: vocab.json and merges.txt do not match ({_reason(error)}). "
            "Download both again."
        ) from None
