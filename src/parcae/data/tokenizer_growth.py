"""How much a `tokenizer.json`, which may come from a stranger, can lengthen a text.

Each step of a normalizer is linear, but a chain of a few dozen can multiply the length without end.
Bounds of whole chains follow from their settings; they are in characters per character.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers

LIMITS = {"normalizer": 10_000, "pre_tokenizer": 32}
"""Bounds of real tokenizers are at most 972 (XLNet) and 20 (CLIP)."""
LONGEST_ENTRY = 1 << 14
"""Characters of a decoded token."""
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
"""Of a model: what it writes around the parts of a word."""
UNICODE = 18
"""Characters of the compatible form of U+FDFA; no other character has more."""
UNICODE_STEPS = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents")
LENGTHENED = 4 << 20
"""Characters that may be encoded at once, at most twice as many: they take up to 1.1 GB."""
USUAL_GROWTH = 16.0
"""Of whole texts; of a syllable of Hangul, three letters of three bytes, it is 9."""


def check_growth(tokenizer: tokenizers.Tokenizer) -> float:
    """The bound of a text's growth before it is split into tokens. ValueError if it, or that of
    decoded tokens, is too large."""
    affixes = [getattr(tokenizer.model, name, None) or "" for name in AFFIXES]
    growth = {
        "normalizer": chain_growth(_steps(tokenizer.normalizer)),
        "pre_tokenizer": chain_growth(_steps(tokenizer.pre_tokenizer))
        * (1 + sum(map(len, affixes))),
    }
    for name, limit in LIMITS.items():
        if growth[name] > limit:
            raise ValueError(
                f"its {name} may lengthen a text {growth[name]:.3g} times, which must be at most "
                f"{limit:,}"
            )
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    decoded = longest * chain_growth(_steps(tokenizer.decoder))
    if decoded > LONGEST_ENTRY:
        raise ValueError(
            f"one token may be {decoded:.3g} characters of text, which must be at most "
            f"{LONGEST_ENTRY:,}"
        )
    return math.prod(growth.values())


def check_texts(tokenizer: tokenizers.Tokenizer, growth: float, texts: Sequence[str]) -> None:
    """Raise ValueError if a text, which `growth` bounds, becomes more than `USUAL_GROWTH` longer.

    Where the bound does not exclude it, it is measured on short parts, one after the other.
    """
    size = max(1, int(LENGTHENED / growth))
    for text in (text for text in texts if len(text) > size):
        left = usual_length(len(text))
        for start in range(0, len(text), size):
            part = text[start : start + size]
            if tokenizer.normalizer is not None:
                part = tokenizer.normalizer.normalize_str(part)
            if tokenizer.pre_tokenizer is not None:
                part = "".join(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part))
            left -= len(part)
            check_length(left)


def usual_length(characters: int) -> float:
    """Characters, or tokens, that texts of this length may become."""
    return LENGTHENED + USUAL_GROWTH * characters


def check_length(left: float) -> None:
    if left < 0:
        raise ValueError(f"it makes the text more than {USUAL_GROWTH:.0f} times longer")


def chain_growth(steps: Sequence[dict[str, Any]]) -> float:
    """The bound of steps, one after the other.

    Replacements of which each needs a character that those before it do not write, such as a list
    of ligatures, do not multiply: each takes away a character that was there before all of them.
    """
    growth, stage, written, last = 1.0, 1.0, None, ""
    for step in steps:
        pattern = step.get("pattern", {}).get("String", "") if step["type"] == "Replace" else ""
        if pattern and written is not None and not set(pattern) <= written:
            stage = max(stage, len(step["content"]))
        elif not (step["type"] in UNICODE_STEPS and last in UNICODE_STEPS):
            growth, stage = growth * stage, step_growth(step)
            written = set() if pattern else None
        if written is not None:
            written |= set(step["content"])
        last = step["type"]
    return growth * stage


def step_growth(step: dict[str, Any]) -> float:
    """The bound of one step of a normalizer, pre-tokenizer or decoder."""
    kind = step["type"]
    if kind == "Replace":
        content, pattern = len(step["content"]), step["pattern"].get("String")
        # An expression may match the empty text before and after every character.
        return max(1.0, content / len(pattern)) if pattern else 1.0 + 2 * content
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "Precompiled":  # the replacements, behind an index and its size
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1.0, *(len(text.decode(errors="replace")) for text in texts))
    if kind == "ByteLevel":  # a character has up to four bytes, each of which becomes a letter
        return 8.0 if step.get("add_prefix_space") else 4.0
    is_split_everywhere = kind in ("BPEDecoder", "CTC") and "" in step.values()
    if is_split_everywhere or kind == "BertNormalizer":  # it puts spaces around Chinese characters
        return 3.0 * (UNICODE if kind == "BertNormalizer" else 1)
    if kind in UNICODE_STEPS:
        return UNICODE
    return 2.0 if kind in ("Metaspace", "WordPiece") else 1.0


def _steps(part: Any) -> list[dict[str, Any]]:
    """What a normalizer, pre-tokenizer or decoder does, in order."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    names = ("normalizers", "pretokenizers", "decoders")
    parts = next((step[name] for name in names if name in step), None)
    if parts is None:
        yield step
        return
    for part in parts:
        yield from _flat(part)
