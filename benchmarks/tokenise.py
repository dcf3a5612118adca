"""Speed of `parcae data prepare` compared with `encode_batch` of `tokenizers`.

    python benchmarks/tokenise.py [SOURCE ...] [--tokenizer FILE] [--megabytes 6] [--rounds 5]

Both encode the same text on the same cores, interleaved (A B A B). `encode_batch` gets a list in
memory and discards the ids; prepare reads a file, holds out validation documents, and writes and
checksums shards. Compare the ratios of minima and of medians; the rates depend on the machine and
its load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import tokenizers

from parcae.data.preparation import prepare
from parcae.data.readers import read_documents
from parcae.data.sources import find_files
from parcae.data.tokenizer import Tokenizer
from parcae.files import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="*", default=["builtin"])
    parser.add_argument(
        "--tokenizer", help="tokenizer.json to use (default: train one on the text)"
    )
    parser.add_argument("--megabytes", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="write the result to this JSON file")
    arguments = parser.parse_args()

    texts = read_texts(arguments.sources, int(arguments.megabytes * 1e6))
    tokenizer = (
        Tokenizer.load(arguments.tokenizer) if arguments.tokenizer else Tokenizer.train(texts)
    )
    result = measure(texts, tokenizer, arguments.rounds)
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_json(arguments.out, result)


def read_texts(sources: list[str], characters: int) -> list[str]:
    texts: list[str] = []
    for document in read_documents(find_files(sources)):
        if characters <= 0:
            break
        texts.append(document.text[:characters])
        characters -= len(texts[-1])
    return texts


def measure(texts: list[str], tokenizer: Tokenizer, rounds: int) -> dict[str, float]:
    library = tokenizers.Tokenizer.from_str(tokenizer.content)
    seconds: dict[str, list[float]] = {"encode_batch": [], "prepare": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "texts.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for turn in range(rounds):
            started = time.perf_counter()
            library.encode_batch(texts)
            seconds["encode_batch"].append(time.perf_counter() - started)

            started = time.perf_counter()
            prepare([source], tokenizer, folder / f"shards-{turn}")
            seconds["prepare"].append(time.perf_counter() - started)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    low = {name: min(values) for name, values in seconds.items()}
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "megabytes": megabytes,
        "documents": len(texts),
        "rounds": rounds,
        "encode_batch_MB_per_s": megabytes / low["encode_batch"],
        "prepare_MB_per_s": megabytes / low["prepare"],
        "ratio_of_minima": low["encode_batch"] / low["prepare"],
        "ratio_of_medians": middle["encode_batch"] / middle["prepare"],
    }


if __name__ == "__main__":
    main()
