"""What the tests of preparation share: a small corpus, its tokenizer, and ways to look at it."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from parcae.data.preparation import Preparation
from parcae.data.shards import ShardedDocuments
from parcae.data.sources import Corpus, find_files
from parcae.data.tokenizer import Tokenizer

FRACTION = 0.2


def small_tokenizer() -> Tokenizer:
    return Tokenizer.train(["some text to learn from, and some more text " * 20], 300)


def small_texts() -> list[str]:
    chance = random.Random(7)
    words = ["loop", "state", "depth", "prelude", "coda", "\n", "42", "🙂", "<|bos|>"]
    documents = [" ".join(chance.choices(words, k=chance.randint(1, 60))) for _ in range(300)]
    documents[::50] = [""] * 6
    return documents


def write_source(path: Path, texts: list[str]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()))
    return path


def write_sources(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    write_source(folder / "a.jsonl.gz", texts[:200])
    write_source(folder / "b.jsonl.gz", texts[200:])
    return folder


def work_on(source: Path, tokenizer: Tokenizer, **settings: object) -> Preparation:
    shard_tokens = settings.pop("shard_tokens", 2000)
    corpus = Corpus(find_files([source]), **{"validation_fraction": FRACTION, **settings})  # type: ignore[arg-type]
    return Preparation(corpus, tokenizer, shard_tokens)  # type: ignore[arg-type]


def documents_of(folder: Path, split: str) -> list[list[int]]:
    shards = ShardedDocuments.open(folder, split, verify=True)  # type: ignore[arg-type]
    return [shards.tokens(number).tolist() for number in range(len(shards.lengths))]


def contents(folder: Path) -> dict[str, bytes]:
    """Everything but the lock, which names the process that held it."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}


class Stopped(BaseException):
    """As near to a kill as one process gets: nobody catches it."""
