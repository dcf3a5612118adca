"""`parcae data prepare | inspect | download`: from documents to shards, and a look at them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from parcae import console
from parcae.commands import download
from parcae.config import require

if TYPE_CHECKING:
    from parcae.data.readers import Reading

VALIDATION_FRACTION = 0.005


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("data", help="prepare, inspect and download documents and tasks")
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _register_prepare(actions)
    _register_inspect(actions)
    download.register(actions)


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """How files become documents; the same for all commands that read some."""
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="JSON key or Parquet column with the text (default: text)",
    )
    parser.add_argument(
        "--document-start",
        metavar="REGEX",
        help="in text files, a line that matches starts a new document",
    )
    parser.add_argument(
        "--encoding-errors",
        choices=("strict", "replace"),
        default="strict",
        help="what to do about bytes that are not UTF-8",
    )


def reading(arguments: argparse.Namespace) -> Reading:
    from parcae.data.readers import Reading

    return Reading(
        text_field=arguments.text_field,
        document_start=arguments.document_start,
        encoding_errors=arguments.encoding_errors,
    )


def _register_prepare(actions: Any) -> None:
    parser = actions.add_parser("prepare", help="tokenise documents into shards")
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or `builtin`"
    )
    parser.add_argument("--tokenizer", required=True, metavar="FILE")
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument(
        "--validation",
        action="append",
        default=[],
        metavar="SOURCE",
        help="hold out these documents instead of a fraction; may be repeated",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        metavar="SHARE",
        help="share of the documents to hold out (default: 0.005)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1 << 26,
        metavar="N",
        help="tokens after which a new shard starts (default: 64 Mi)",
    )
    add_reading_options(parser)
    parser.set_defaults(run=run_prepare)


def run_prepare(arguments: argparse.Namespace) -> int:
    from parcae.data.corpus import find_files
    from parcae.data.encoding import Preparation
    from parcae.data.prepare import Update, prepare
    from parcae.data.tokenizer import Tokenizer

    fraction = arguments.validation_fraction
    require(
        fraction is None or not arguments.validation,
        "--validation-fraction",
        "means nothing beside --validation, which names all that is held out",
        "Leave one of them out.",
    )
    work = Preparation(
        files=find_files(arguments.sources),
        tokenizer=Tokenizer.load(arguments.tokenizer),
        validation_files=find_files(arguments.validation) if arguments.validation else (),
        validation_fraction=VALIDATION_FRACTION if fraction is None else fraction,
        shard_tokens=arguments.shard_tokens,
        reading=reading(arguments),
    )
    mebibyte = 2**20
    with console.progress_bar(work.source_bytes / mebibyte) as show:

        def report(update: Update) -> None:
            tokens = f", {console.format_count(update.tokens)} tokens" if update.tokens else ""
            show(f"{update.activity} (MiB{tokens})", update.source_bytes / mebibyte)

        manifest = prepare(work, arguments.out, report)
    _print_manifest(arguments.out, manifest)
    return 0


def _print_manifest(folder: str, manifest: dict[str, Any]) -> None:
    rows = []
    for split, total in manifest["totals"].items():
        content = max(1, total["tokens"] - total["documents"])
        rows.append(
            (
                split,
                f"{total['documents']:,}",
                f"{total['tokens']:,}",
                f"{total['text_bytes']:,}",
                f"{total['text_bytes'] / content:.3f}",
                len(manifest["shards"][split]),
            )
        )
    columns = ("split", "documents", "tokens", "bytes of text", "bytes per token", "shards")
    console.out.print(console.table(str(folder), columns, rows))
    skipped = manifest["skipped"]
    if any(skipped.values()):
        console.out.print(
            f"Left out: {skipped['empty']:,} without text, "
            f"{skipped['held_out']:,} that also stand in validation."
        )
    if not manifest["totals"]["validation"]["documents"]:
        console.err.print("Nothing was held out: raise --validation-fraction to validate on this.")


def _register_inspect(actions: Any) -> None:
    parser = actions.add_parser("inspect", help="look at shards and at the rows packed from them")
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--rows", type=int, default=8, metavar="N")
    parser.add_argument("--out", metavar="FOLDER", help="where to draw the figures")
    parser.add_argument("--split", choices=("train", "validation"), default="train")
    parser.add_argument("--verify", action="store_true", help="check every shard's checksum first")
    parser.set_defaults(run=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> int:
    from parcae.data.inspect import inspect
    from parcae.data.shards import Shards

    shards = Shards.open(arguments.folder, arguments.split)
    if arguments.verify:
        for _ in console.track(shards.verify(), "checking", total=len(shards.records)):
            pass
        words = f"{arguments.folder}: every checksum of {arguments.split} is right."
        console.out.print(words, soft_wrap=True)
    tokenizer = shards.tokenizer()
    inspect(
        shards,
        tokenizer.decode,
        context=arguments.context,
        rows=arguments.rows,
        out_folder=arguments.out,
        bytes_of_token=tokenizer.bytes_per_token() if tokenizer.is_byte_level else None,
    )
    return 0
