"""`parcae tokenizer train | eval`: make a vocabulary, and compare what it saves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcae import console
from parcae.commands.data import add_reading_options, reading

if TYPE_CHECKING:
    from collections.abc import Iterator


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("tokenizer", help="train a tokenizer, or compare some")
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _register_train(actions)
    _register_eval(actions)


def _register_train(actions: Any) -> None:
    parser = actions.add_parser("train", help="byte-level BPE, as in the paper")
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or `builtin`"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="such as tokenizer.json")
    parser.add_argument(
        "--size",
        type=int,
        default=32_768,
        metavar="N",
        help="entries, specials included (default: 32768)",
    )
    parser.add_argument(
        "--characters",
        type=float,
        default=2e9,
        metavar="N",
        help="stop reading after so many (default: 2e9)",
    )
    parser.add_argument(
        "--document-cap",
        type=int,
        default=10_000,
        metavar="N",
        help="characters of each document to read, 0 for all (default: 10000)",
    )
    add_reading_options(parser)
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    from parcae.data.corpus import bytes_read, find_files, read_documents
    from parcae.data.tokenizer import train, within_budget

    files = find_files(arguments.sources)
    total = sum(file.bytes for file in files) / 2**20
    read_so_far = bytes_read(files)
    with console.progress_bar(total) as show:

        def texts() -> Iterator[str]:
            for document in read_documents(files, reading(arguments)):
                show("reading (MiB)", read_so_far(document) / 2**20)
                yield document.text

        tokenizer = train(
            within_budget(texts(), arguments.characters, arguments.document_cap),
            arguments.size,
            on_merge=lambda: show("merging", total),
        )
    tokenizer.save(arguments.out)
    words = f"{arguments.out}: {tokenizer.vocab_size:,} entries, {tokenizer.sha256[:12]}"
    console.out.print(words, soft_wrap=True)
    if tokenizer.vocab_size < arguments.size:
        console.err.print(
            f"The text has only {tokenizer.vocab_size:,} of the {arguments.size:,} entries in it: "
            "give it more text, or ask for fewer."
        )
    return 0


def _register_eval(actions: Any) -> None:
    parser = actions.add_parser("eval", help="bytes per token of one or several tokenizers")
    parser.add_argument(
        "tokenizers",
        nargs="+",
        metavar="TOKENIZER",
        help="tokenizer.json files, or folders with vocab.json and merges.txt",
    )
    parser.add_argument(
        "--on",
        action="append",
        required=True,
        metavar="SOURCE",
        help="text to compress, one row each; may be repeated",
    )
    add_reading_options(parser)
    parser.set_defaults(run=run_eval)


def run_eval(arguments: argparse.Namespace) -> int:
    from parcae.data.compression import compare
    from parcae.data.corpus import find_files
    from parcae.data.tokenizer import Tokenizer

    tokenizers = [(name, Tokenizer.load(name)) for name in arguments.tokenizers]
    sources = [(name, find_files([name])) for name in arguments.on]
    total = sum(file.bytes for _, files in sources for file in files) / 2**20
    with console.progress_bar(total) as show:
        rows = compare([t for _, t in tokenizers], sources, reading(arguments), show)
    columns = ["tokenizer", "entries", *(_short(row.source) for row in rows)]
    cells = [
        (_short(name), f"{t.vocab_size:,}", *(f"{row.bytes_per_token[place]:.3f}" for row in rows))
        for place, (name, t) in enumerate(tokenizers)
    ]
    megabytes = ("text, MiB", "", *(f"{row.text_bytes / 2**20:.2f}" for row in rows))
    title = "Bytes per token: more is shorter"
    console.out.print(console.table(title, columns, [*cells, megabytes]))
    return 0


def _short(source: str) -> str:
    """Folder and stem: enough to tell files apart, and short enough for a column."""
    path = Path(source)
    return "/".join(part for part in (path.parent.name, path.name.split(".json")[0]) if part)
