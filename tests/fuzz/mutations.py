"""Random changes of files: of their bytes, of values in JSON and TOML, of cells in CSV.

Every change follows from a `random.Random`, so that a case can be repeated from its number.
"""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import tomllib
import zipfile
from collections.abc import Callable
from typing import Any

import tomli_w

from parcae.evaluation.results import _checksum as record_checksum
from parcae.files import _seal
from parcae.runs.checkpoints import _checksum

Mutation = Callable[[bytes, random.Random], bytes]

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, -(2**63))
HUGE = (10**12, 10**30, 10**400, 1e30, 1e308, -1e308, 5e-324, 0.5, -0.0)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "none", "nan", "../../etc/passwd", "/etc/passwd", "a/b", "\0", "\x1b[2J", "<b>")
LONG = ("y" * 5000, "ü" * 300, "9" * 5000, "\ud800")
CONTAINERS: tuple[Any, ...] = ([], {}, [[]], [None], {"": None}, [1] * 1000, {"a": {"b": []}})
PLAIN = (None, True, False, *NUMBERS, *HUGE, *NOT_FINITE, *TEXTS, *LONG, *CONTAINERS)
BYTES = (b"\0", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\n", b'"', b"{", b"[", b"]", b"}", b",")


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def odd_value(rng: random.Random) -> Any:
    """A value of another type or size than expected."""
    if rng.random() < 0.03:
        return deep(rng.choice((10, 60, 70, 300)))
    return copy.deepcopy(rng.choice(PLAIN))


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    found: list[tuple[Any, Any]] = []
    queue = [tree]
    while queue:
        node = queue.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                queue.append(node[key])
    return found


def change_tree(tree: Any, rng: random.Random) -> Any:
    """The tree with one to three values replaced, removed, renamed or exchanged."""
    if rng.random() < 0.02:
        return odd_value(rng)
    for _ in range(rng.randint(1, 3)):
        places = nodes(tree)
        if not places:
            break
        node, key = rng.choice(places)
        what = rng.random()
        if what < 0.65:
            node[key] = odd_value(rng)
        elif what < 0.8:
            del node[key]
        elif what < 0.9 and isinstance(node, dict):
            node[rng.choice(TEXTS)] = node.pop(key)
        else:
            other, name = rng.choice(places)
            if isinstance(node[key], int | float) and not isinstance(node[key], bool):
                factor = rng.choice((-1, 2, 1000, 0.5))
                is_huge = abs(node[key]) > 1e300  # an integer that no float can hold
                node[key] *= 2 if is_huge else factor
            else:
                node[key] = copy.deepcopy(other[name])
    return tree


def flip_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with bits flipped, cut off, or with something inserted, repeated or overwritten."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        place = rng.randrange(len(data) + 1)
        what = rng.random()
        if what < 0.45 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif what < 0.6:
            del data[place:]
        elif what < 0.75:
            data[place:place] = rng.choice(BYTES) * rng.choice((1, 1, 1, 50))
        elif what < 0.85:
            size = rng.choice((1, 4, 8, 64))
            data[place : place + size] = rng.choice((bytes(size), b"\xff" * size))
        elif what < 0.95:
            number = rng.choice([n for n in NUMBERS if 0 <= n < 2**64])
            data[place : place + 8] = struct.pack("<Q", number)
        else:
            other = rng.randrange(len(data) + 1)
            data[place:place] = data[other : other + 64]
    return bytes(data)


def json_file(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return flip_bytes(content, rng)
    return json.dumps(change_tree(json.loads(content), rng)).encode()


SHORT = ("", "a", "aa", " ", "▁", "é", "中", "ﷺ", "s" * 30)
PATTERNS = (*({"String": text} for text in SHORT), {"Regex": "a*"}, {"Regex": "."}, {"Regex": "^"})
YES_OR_NO = (True, False)
BYTE_LEVEL = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), YES_OR_NO)
BERT = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
STEPS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "normalizer": ("normalizers", {
        "Replace": {"pattern": PATTERNS, "content": SHORT},
        "Prepend": {"prepend": SHORT},
        "BertNormalizer": dict.fromkeys(BERT, YES_OR_NO),
        "NFKC": {}, "NFD": {}, "Lowercase": {}, "ByteLevel": {},
        "Strip": {"strip_left": YES_OR_NO, "strip_right": YES_OR_NO},
        "Precompiled": {"precompiled_charsmap": ("", "BAAAAAAAAABhAA==")},
    }),
    "pre_tokenizer": ("pretokenizers", {
        "ByteLevel": BYTE_LEVEL,
        "Metaspace": {"replacement": ("a", "▁"), "prepend_scheme": ("always", "first"),
                      "split": YES_OR_NO},
        "Split": {"pattern": PATTERNS, "behavior": ("Removed", "Isolated"),
                  "invert": YES_OR_NO},
        "FixedLength": {"length": (0, 1, 3)},
        "Punctuation": {"behavior": ("Isolated", "Contiguous")},
    }),
    "decoder": ("decoders", {
        "Replace": {"pattern": PATTERNS, "content": SHORT},
        "BPEDecoder": {"suffix": SHORT},
        "CTC": {"pad_token": SHORT, "word_delimiter_token": SHORT, "cleanup": YES_OR_NO},
        "Strip": {"content": ("a", " "), "start": (0, 1, 9), "stop": (0, 1, 9)},
        "WordPiece": {"prefix": SHORT, "cleanup": YES_OR_NO},
        "ByteLevel": BYTE_LEVEL,
        "Fuse": {}, "ByteFallback": {},
    }),
}  # fmt: skip
"""By part of a tokenizer: what a sequence of its steps is called, and the settings of each kind."""


def tokenizer_file(content: bytes, rng: random.Random) -> bytes:
    """A tokenizer.json, half of the time with chains of steps that may lengthen a text."""
    if rng.random() < 0.5:
        return json_file(content, rng)
    tree = json.loads(content)
    for part in rng.sample(list(STEPS), rng.randint(1, 3)):
        plural, kinds = STEPS[part]
        steps = []
        for kind in rng.choices(list(kinds), k=rng.randint(1, 3)):
            step = {name: rng.choice(values) for name, values in kinds[kind].items()}
            steps += rng.choice((1, 1, 1, 2, 40)) * [{"type": kind, **step}]
        tree[part] = {"type": "Sequence", plural: steps}
    if rng.random() < 0.2:
        name = rng.choice(("continuing_subword_prefix", "end_of_word_suffix", "unk_token"))
        tree["model"][name] = rng.choice(SHORT)
    return json.dumps(tree).encode()


def json_lines(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return flip_bytes(content, rng)
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = json.dumps(change_tree(json.loads(lines[place]), rng)).encode()
    return b"\n".join(lines) + b"\n"


def sealed_file(content: bytes, rng: random.Random) -> bytes:
    """A JSON file with a checksum of itself, which is made to fit most changes."""
    if rng.random() < 0.1:
        return json_file(content, rng)
    tree = json.loads(content)
    del tree["seal"]
    tree = change_tree(tree, rng)
    if isinstance(tree, dict):
        try:
            tree["seal"] = _seal(tree)
        except ValueError:  # not finite
            tree["seal"] = ""
    return json.dumps(tree).encode()


def state_file(content: bytes, rng: random.Random) -> bytes:
    """The state.json of a checkpoint, with a checksum that fits."""
    if rng.random() < 0.1:
        return json_file(content, rng)
    tree = json.loads(content)
    del tree["sha256"]
    tree = change_tree(tree, rng)
    if isinstance(tree, dict):
        tree["sha256"] = _checksum(tree)
    return json.dumps(tree).encode()


def toml_file(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return flip_bytes(content, rng)
    tree = change_tree(tomllib.loads(content.decode()), rng)
    try:
        return tomli_w.dumps(tree).encode()
    except (TypeError, ValueError, AttributeError, RecursionError):  # TOML has no null
        return flip_bytes(content, rng)


def csv_file(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return flip_bytes(content, rng)
    rows = [line.split(",") for line in content.decode().splitlines()]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        if not row:
            continue
        place = rng.randrange(len(row))
        what = rng.random()
        if what < 0.7:
            row[place] = str(rng.choice((*NUMBERS, *NOT_FINITE, *TEXTS, 1e30, "1e999", "9" * 500)))
        elif what < 0.85:
            del row[place]
        else:
            rows.append(list(row))
    return "\n".join(",".join(row) for row in rows).encode("utf-8", "replace")


def safetensors_file(content: bytes, rng: random.Random) -> bytes:
    """Weights: the bytes, or the header with sizes, types and offsets of tensors."""
    if rng.random() < 0.4:
        return flip_bytes(content[:4096], rng) + content[4096:]
    size = int.from_bytes(content[:8], "little")
    tree = change_tree(json.loads(content[8 : 8 + size]), rng)
    header = json.dumps(tree).encode("utf-8", "replace")
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def zip_file(content: bytes, rng: random.Random) -> bytes:
    """A file of `torch.save`: its bytes, or those of an entry, with a valid archive around it."""
    if rng.random() < 0.4:
        return flip_bytes(content, rng)
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        chosen = rng.choice([n for n in old.namelist() if n.endswith((".pkl", "version"))])
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, flip_bytes(data, rng) if name == chosen else data)
    return stream.getvalue()


def compressed(
    change: Mutation, compress: Callable[[bytes], bytes], expand: Callable[[bytes], bytes]
) -> Mutation:
    """Change the bytes of a compressed file, or its content."""

    def changed(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return flip_bytes(content, rng)
        return compress(change(expand(content), rng))

    return changed


def sample_lines(content: bytes, rng: random.Random) -> bytes:
    """The samples of an evaluation, each with a checksum that fits."""
    if rng.random() < 0.25:
        return flip_bytes(content, rng)
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    tree = json.loads(lines[place])
    del tree["crc32"]
    tree = change_tree(tree, rng)
    if isinstance(tree, dict):
        tree["crc32"] = record_checksum(tree)
    lines[place] = json.dumps(tree).encode()
    return b"\n".join(lines) + b"\n"


def http_request(content: bytes, rng: random.Random) -> bytes:
    """A request with other headers, another path or method, or other bytes."""
    if rng.random() < 0.4:
        return flip_bytes(content, rng)
    head, _, body = content.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        what = rng.random()
        text = str(rng.choice((*NUMBERS, *HUGE[:3], *TEXTS, *LONG, "[::1", "http://", "1" * 4400)))
        odd = text.encode("utf-8", "surrogatepass")
        if what < 0.6:
            words = lines[place].split(b" ")
            words[rng.randrange(len(words))] = odd
            lines[place] = b" ".join(words)
        elif what < 0.8:
            lines.append(lines[place])
        elif len(lines) > 1:
            del lines[place]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
