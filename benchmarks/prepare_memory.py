"""Peak memory of `parcae data prepare` on very large files, documents and numbers of documents.

    python benchmarks/prepare_memory.py [--megabytes 48] [--kinds text json parquet ...]

Each kind is prepared in its own process, whose peak resident memory is printed (Linux only:
`ru_maxrss` would include the parent's memory before exec). The text is the built-in corpus,
repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from parcae.data.readers import read_documents
from parcae.data.sources import find_files
from parcae.data.tokenizer import Tokenizer

MEASURED = """
    import re, sys
    from pathlib import Path
    from parcae.data.preparation import prepare
    source, tokenizer, out = sys.argv[1:]
    prepare([source], tokenizer, out)
    status = Path("/proc/self/status").read_text()
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1024)
"""


def write_text(folder: Path, text: str) -> Path:
    """One text file."""
    path = folder / "giant.txt"
    path.write_text(text)
    return path


def write_json(folder: Path, text: str) -> Path:
    """One JSON record; one emoji makes Python store four bytes per character."""
    path = folder / "giant.jsonl"
    path.write_text(json.dumps({"text": text + "\N{SLIGHTLY SMILING FACE}"}, ensure_ascii=False))
    return path


def write_parquet(folder: Path, text: str) -> Path:
    """Many rows in a single row group."""
    path = folder / "group.parquet"
    rows = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=len(rows))
    return path


def write_one_word(folder: Path, text: str) -> Path:
    """One word of letters, without a position to cut at."""
    path = folder / "word.txt"
    path.write_text("".join(filter(str.isalpha, text[: len(text) // 4])))
    return path


def write_tiny(folder: Path, text: str) -> Path:
    """Many records of one letter each."""
    path = folder / "tiny.jsonl"
    path.write_text('{"text": "a"}\n' * (len(text) // 24))
    return path


def write_empty(folder: Path, text: str) -> Path:
    """One record with text, then many without."""
    path = folder / "empty.jsonl"
    path.write_text('{"text": "some"}\n' + '{"text": ""}\n' * (len(text) // 16))
    return path


def write_repetitive(folder: Path, text: str) -> Path:
    """Text that zstandard compresses ten thousand times."""
    path = folder / "repetitive.jsonl.zst"
    record = json.dumps({"text": "boilerplate " * 400}).encode() + b"\n"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as stream:
        for _ in range(8 * len(text) // len(record)):
            stream.write(record)
    return path


KINDS: dict[str, Callable[[Path, str], Path]] = {
    "text": write_text,
    "json": write_json,
    "parquet": write_parquet,
    "one-word": write_one_word,
    "tiny": write_tiny,
    "empty": write_empty,
    "repetitive": write_repetitive,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=float, default=48.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    corpus = [d.text for d in read_documents(find_files(["builtin"]))]
    once = "".join(corpus).encode("ascii", "replace").decode()
    characters = int(arguments.megabytes * 1e6)
    text = (once * (characters // len(once) + 1))[:characters]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Tokenizer.train(corpus, 8192).save(folder / "tokenizer.json")
        for kind in arguments.kinds:
            source = KINDS[kind](folder, text)
            command = [sys.executable, "-c", textwrap.dedent(MEASURED), str(source)]
            command += [str(folder / "tokenizer.json"), str(folder / kind)]
            peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            size = source.stat().st_size / 1e6
            print(f"{kind:10} {size:6.1f} MB: peak {float(peak):.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
