"""Text to ids and back: byte-level BPE in one standard `tokenizer.json`.

    tokenizer = train(texts, size=32_768)
    tokenizer.save("tokenizer.json")
    ids = Tokenizer.load("tokenizer.json").encode("any text")

Ids 0, 1 and 2 are `<|bos|>`, `<|eos|>` and `<|pad|>`, whatever the size; the 256 single bytes
follow, then the merges. Nothing is normalised, so every string comes back as it was. Text that
spells a special token is ordinary text unless `allow_special=True`.

Long texts are encoded in pieces, which bounds memory and lets one document use all cores. The
pieces meet only where the split always parts two tokens, so the ids are those of the whole text.
The exception is a run of `LONGEST_PIECE` characters without such a place, which is cut there.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from parcae.config import ConfigError, require
from parcae.files import FileError, atomic_path, reading

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
SMALLEST_SIZE = 256 + len(SPECIALS)

CONTRACTION = r"'(?i:[sdmt]|ll|ve|re)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
NUMBER = r"\p{N}{1,2}"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LINE_BREAK = r"\s*[\r\n]+"
SPACE_BEFORE_WORD = r"\s+(?!\S)"
SPLIT = "|".join((CONTRACTION, WORD, NUMBER, PUNCTUATION, LINE_BREAK, SPACE_BEFORE_WORD, r"\s+"))

USUAL_PIECE = 16_384
LONGEST_PIECE = 131_072
BATCH_CHARACTERS = 1 << 20
PIECE_CHARACTERS = 200
"""Charged for each piece beside its text: what the library keeps for one, however short."""
SAFE_CUT = re.compile(r"(?<=\S)(?= )|(?<=\n)(?=\S)")
"""Before a space that follows a visible character, or after a line break: `SPLIT` never joins
across these, and looks neither back over the first nor ahead over the second."""


def _byte_letters() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for letters from
    U+0100 on, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()
BOS_NAMES = ("<|bos|>", "<|begin_of_text|>", "<s>", "<|endoftext|>", "<|startoftext|>")


class Tokenizer:
    """A `tokenizer.json` of our own or of others, with what training and evaluation ask of it."""

    def __init__(self, content: str, name: str = "tokenizer") -> None:
        self.name = name
        self.content = content
        self._plain = _whole_texts(content)
        self._plain.encode_special_tokens = True  # reads "encode the spelling, not the token"
        self._special = _whole_texts(content)
        self._cuts_safely = _cuts_safely(json.loads(content))
        if not self._plain.get_vocab_size(with_added_tokens=True):
            raise ValueError("its vocabulary is empty")
        if missing := self._missing_bytes():
            raise ValueError(f"{missing} of the 256 bytes are not in it: text would be lost")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """A `tokenizer.json`, or a folder with one, or with `vocab.json` and `merges.txt`."""
        path = Path(path)
        with reading(path):
            is_folder = path.is_dir()
            in_two_files = is_folder and not (path / "tokenizer.json").exists()
            if in_two_files and (path / "merges.txt").exists():
                return cls(_read_gpt2_layout(path), path.name)
        path = path / "tokenizer.json" if is_folder else path
        try:
            with reading(path):
                return cls(path.read_text(encoding="utf-8"), path.stem)
        except FileError:
            if path.exists():
                raise
            raise FileError(
                f"{path}: no such tokenizer. Make one with `parcae tokenizer train`."
            ) from None
        except Exception as error:  # tokenizers raises bare Exception
            raise FileError(f"{path}: not a tokenizer.json ({error}). Is it truncated?") from None

    def save(self, path: str | Path) -> None:
        with atomic_path(path) as temporary:
            temporary.write_text(self.content, encoding="utf-8")

    @cached_property
    def sha256(self) -> str:
        """Of the content, not of its spelling: spaces and key order in the file do not matter."""
        canonical = json.dumps(json.loads(self.content), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, which is what an embedding table needs."""
        return max(self._plain.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def token_dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id, little-endian."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @cached_property
    def is_byte_level(self) -> bool:
        return (json.loads(self.content).get("decoder") or {}).get("type") == "ByteLevel"

    def _missing_bytes(self) -> int:
        """Of a byte-level vocabulary; the library drops what it cannot spell without a word."""
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
            f"{self.name}: no token to start documents with; looked for {', '.join(BOS_NAMES)}. "
            "Train one with `parcae tokenizer train`."
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        encoder = self._special if allow_special else self._plain
        encodings = encoder.encode_batch_fast(list(self._pieces(text)), add_special_tokens=False)
        return [number for encoding in encodings for number in encoding.ids]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """BOS and the ids of each text, on all cores."""
        bos = np.array([self.bos], self.token_dtype)
        parts = [[bos] for _ in texts]
        pieces = (
            (number, piece) for number, text in enumerate(texts) for piece in self._pieces(text)
        )
        for batch in _batches(pieces):
            encodings = self._plain.encode_batch_fast(
                [piece for _, piece in batch], add_special_tokens=False
            )
            for (number, _), encoding in zip(batch, encodings, strict=True):
                parts[number].append(np.array(encoding.ids, bos.dtype))
        return [np.concatenate(part) for part in parts]

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are spelled out; bytes that are not UTF-8 become U+FFFD."""
        return self._plain.decode([int(number) for number in ids], skip_special_tokens=False)

    def bytes_per_token(self) -> np.ndarray:
        """How many bytes of text each id stands for, specials none: int32, indexed by id."""
        if not self.is_byte_level:
            raise ConfigError(f"{self.name}: not a byte-level tokenizer, so bytes are not defined.")
        table = np.zeros(self.vocab_size, np.int32)
        for token, number in self._plain.get_vocab(with_added_tokens=False).items():
            table[number] = len(token)  # the byte alphabet has one letter per byte
        for number, token in self._plain.get_added_tokens_decoder().items():
            table[number] = 0 if token.special else len(token.content.encode())
        return table

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each id spells, indexed by id; specials by their name. Joined and decoded they are
        the text; one alone may be part of a character."""
        spelled = [b""] * self.vocab_size
        for token, number in self._plain.get_vocab(with_added_tokens=True).items():
            spelled[number] = self._spell(token, number)
        return spelled

    def _spell(self, token: str, number: int) -> bytes:
        if self.is_byte_level and all(letter in BYTE_OF_LETTER for letter in token):
            return bytes(BYTE_OF_LETTER[letter] for letter in token)
        return token.encode()

    def _pieces(self, text: str) -> Iterable[str]:
        return safe_pieces(text) if self._cuts_safely else [text]


def train(
    texts: Iterable[str], size: int = 32_768, *, on_merge: Callable[[], None] | None = None
) -> Tokenizer:
    """The same texts in the same order give the same tokenizer, byte for byte.

    `on_merge` is called when all texts are read and the merges begin. A corpus too small for
    `size` gives a smaller vocabulary: ask `vocab_size`.
    """
    require(
        size >= SMALLEST_SIZE,
        "size",
        f"{size} has no room for merges",
        f"256 bytes and {len(SPECIALS)} specials need {SMALLEST_SIZE}.",
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

    def read() -> Iterator[str]:
        seen = False
        for text in texts:
            seen = seen or bool(text)
            yield from safe_pieces(text)
        if not seen:
            raise ConfigError("the training texts are empty. Name a source with text in it.")
        if on_merge:
            on_merge()

    blank.train_from_iterator(read(), trainer)
    return Tokenizer(blank.to_str(pretty=True), "tokenizer")


def within_budget(texts: Iterable[str], characters: float, document_cap: int) -> Iterator[str]:
    """The head of every document up to the cap, until the budget is spent; a cap of 0 is none."""
    require(1 <= characters < math.inf, "characters", f"{characters} is not a budget", "Try 2e9.")
    require(document_cap >= 0, "document_cap", f"{document_cap} is negative", "Use 0 for no cap.")
    return _heads(texts, int(characters), document_cap)


def _heads(texts: Iterable[str], left: int, document_cap: int) -> Iterator[str]:
    for text in texts:
        head = text[: min(left, document_cap or left)]
        left -= len(head)
        yield head
        if left <= 0:
            return


def safe_pieces(text: str, usual: int = USUAL_PIECE, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """`text` in order, cut where encoding the pieces gives the ids of the whole."""
    start = 0
    while len(text) - start > usual:
        cut = SAFE_CUT.search(text, start + usual, start + longest)
        end = cut.start() if cut else start + longest
        if end >= len(text):
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _batches(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The library's encodings take a hundred times the room of the ids: only so many at once."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1]) + PIECE_CHARACTERS
        if characters >= BATCH_CHARACTERS:
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
    """Without the limits that a file made for another program may bring along."""
    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _cuts_safely(tree: dict[str, Any]) -> bool:
    """Whether it splits as ours do, and nothing else looks across a `SAFE_CUT`."""
    ours = json.loads(_pre_tokenizer().__getstate__())
    only_specials = all(token["special"] for token in tree.get("added_tokens", ()))
    return tree.get("normalizer") is None and tree.get("pre_tokenizer") == ours and only_specials


def _read_gpt2_layout(folder: Path) -> str:
    """GPT-2's two files, as its own tokenizer reads them."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (vocabulary, merges):
        with reading(path):
            path.open("rb").close()
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise FileError(
            f"{folder}: vocab.json and merges.txt do not fit together ({error}). Fetch both again."
        ) from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()
