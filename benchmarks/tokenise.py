"""How fast `parcae data prepare` tokenises, against `tokenizers`' own `encode_batch`.

    python benchmarks/tokenise.py [SOURCE ...] [--tokenizer FILE] [--megabytes 6] [--rounds 5]

Both get the same text on the same cores, in turns: A B A B. `encode_batch` gets it as a list in
memory and throws the ids away; prepare reads a file, holds out validation, writes shards and
checksums them. The ratio of the minima and of the medians is what counts; the rates themselves
belong to the machine and the moment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import tokenizers

from parcae.data.corpus import find_files, read_documents
from parcae.data.encoding import Preparation
from parcae.data.prepare import prepare
from parcae.data.readers import Reading
from parcae.data.tokenizer import Tokenizer, train
from parcae.files import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="*", default=["builtin"])
    parser.add_argument("--tokenizer", help="a tokenizer.json; trained on the text if left out")
    parser.add_argument("--megabytes", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="write the result here, as JSON")
    arguments = parser.parse_args()

    texts = read_texts(arguments.sources, int(arguments.megabytes * 1e6))
    tokenizer = Tokenizer.load(arguments.tokenizer) if arguments.tokenizer else train(texts)
    result = measure(texts, tokenizer, arguments.rounds)
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_json(arguments.out, result)


def read_texts(sources: list[str], characters: int) -> list[str]:
    texts: list[str] = []
    for document in read_documents(find_files(sources), Reading()):
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
            work = Preparation(find_files([source]), tokenizer)
            prepare(work, folder / f"shards-{turn}")
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
