"""`parcae tokenizer train | eval`: train a tokenizer, and compare tokenizers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcae import console
from parcae.commands.data import add_read_options, byte_progress, read_options

if TYPE_CHECKING:
    from parcae.data.tokenizer_training import TextUse


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("tokenizer", help="train a tokenizer, or compare tokenizers")
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _register_train(actions)
    _register_eval(actions)


def _register_train(actions: Any) -> None:
    parser = actions.add_parser("train", help="train a byte-level BPE tokenizer, as in the paper")
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or `builtin`"
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="file to write, such as tokenizer.json"
    )
    parser.add_argument(
        "--size",
        type=int,
        default=32_768,
        metavar="N",
        help="vocabulary size in entries, special tokens included (default: 32768)",
    )
    parser.add_argument(
        "--characters",
        type=float,
        default=2e9,
        metavar="N",
        help="characters to train on, at most (default: 2e9)",
    )
    parser.add_argument(
        "--document-cap",
        type=int,
        default=10_000,
        metavar="N",
        help="characters to use of each document, at most; 0 for all (default: 10000)",
    )
    add_read_options(parser)
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    from parcae.data.preparation import unsplit_note
    from parcae.data.sources import find_files
    from parcae.data.tokenizer_training import train_tokenizer

    uses: list[TextUse] = []
    with byte_progress() as report:
        tokenizer = train_tokenizer(
            arguments.sources,
            arguments.size,
            characters=arguments.characters,
            document_cap=arguments.document_cap,
            options=read_options(arguments),
            report=report,
            report_use=uses.append,
        )
    tokenizer.save(arguments.out)
    (use,) = uses
    size, digest = tokenizer.vocab_size, tokenizer.sha256[:12]
    console.print_text(f"{arguments.out}: {size:,} entries, sha256 {digest}")
    files = find_files(arguments.sources)
    options = read_options(arguments)
    can_split = not options.splits and any(file.format == "text" for file in files)
    notes = _use_notes(use, tokenizer.vocab_size, arguments.size, can_split)
    for line in filter(None, (unsplit_note(files, options, use.documents), *notes)):
        console.print_text(line, console=console.err)
    return 0


def _use_notes(use: TextUse, entries: int, size: int, can_split: bool) -> list[str]:
    """What the limits cut of the text, and what to do where it was too little."""
    notes, remedy = [], "Use more text, or a smaller --size."
    if use.characters_cut:
        share = use.characters_cut / (use.characters + use.characters_cut)
        notes.append(
            f"Trained on {use.characters:,} characters: --document-cap {use.document_cap} cut "
            f"{use.characters_cut:,} ({share:.1%}), from {use.documents_cut:,} of "
            f"{console.format_items(use.documents, 'document')}. "
            "--document-cap 0 uses whole documents"
            + ("; --separator and --document-start split a text file." if can_split else ".")
        )
        remedy = "Use --document-cap 0, or a smaller --size."
    if use.ended_early:
        notes.append(
            f"Reading ended after {use.characters:,} characters, the limit of --characters."
        )
        remedy = remedy if use.characters_cut else "Raise --characters, or use a smaller --size."
    if entries < size:
        notes.append(f"The text used yields only {entries:,} of {size:,} entries. {remedy}")
    return notes


def _register_eval(actions: Any) -> None:
    parser = actions.add_parser("eval", help="compare the bytes per token of tokenizers")
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
        help="text to encode, one column per source; may be repeated",
    )
    add_read_options(parser)
    parser.set_defaults(run=run_eval)


def run_eval(arguments: argparse.Namespace) -> int:
    from parcae.data.tokenizer_training import compare_tokenizers

    with byte_progress() as report:
        comparison = compare_tokenizers(
            arguments.tokenizers, arguments.on, options=read_options(arguments), report=report
        )
    sources = comparison.sources
    columns = ["tokenizer", "entries", *(_short_name(source.source) for source in sources)]
    tokenizers = zip(comparison.names, comparison.tokenizers, strict=True)
    rows = [
        (
            _short_name(name),
            f"{tokenizer.vocab_size:,}",
            *(f"{source.bytes_per_token[index]:.3f}" for source in sources),
        )
        for index, (name, tokenizer) in enumerate(tokenizers)
    ]
    mebibytes = ("text, MiB", "", *(f"{source.text_bytes / 2**20:.2f}" for source in sources))
    title = "Bytes per token (more means shorter sequences)"
    console.out.print(console.table(title, columns, [*rows, mebibytes]))
    return 0


def _short_name(source: str) -> str:
    """Folder and stem, which distinguish files and fit into a column."""
    path = Path(source)
    return "/".join(part for part in (path.parent.name, path.name.split(".json")[0]) if part)
