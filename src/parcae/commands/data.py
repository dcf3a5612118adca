"""`parcae data prepare | inspect | download`: tokenise documents, inspect shards, get datasets."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from parcae import console
from parcae.config import require
from parcae.evaluation.suites import DOWNLOADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from parcae.data.downloads import RemoteFile, Report
    from parcae.data.inspection import Inspection
    from parcae.data.shards import PreparedFolder
    from parcae.data.sources import ReadOptions

MEBIBYTE = 2**20
CROPPED_WARNING = 0.3
"""Share of cropped tokens above which `inspect` suggests another packing."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("data", help="prepare, inspect and download documents and tasks")
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _register_prepare(actions)
    _register_inspect(actions)
    _register_download(actions)


def add_read_options(parser: argparse.ArgumentParser) -> None:
    """Options of all commands that read documents."""
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="JSON key or Parquet column that contains the text (default: text)",
    )
    parser.add_argument(
        "--document-start",
        metavar="REGEX",
        help="in text files, start a new document at each line that matches this regular "
        "expression (default: none, one document per file)",
    )
    parser.add_argument(
        "--separator",
        metavar="LINE",
        help="in text files, a line equal to this, such as '<|endoftext|>', separates documents "
        "and is dropped (default: none)",
    )
    parser.add_argument(
        "--encoding-errors",
        choices=("strict", "replace"),
        default="strict",
        help="for bytes that are not UTF-8: stop with an error, or replace them by U+FFFD "
        "(default: strict)",
    )


def read_options(arguments: argparse.Namespace) -> ReadOptions:
    from parcae.data.sources import ReadOptions

    return ReadOptions(
        text_field=arguments.text_field,
        document_start=arguments.document_start,
        separator=arguments.separator,
        encoding_errors=arguments.encoding_errors,
    )


@contextmanager
def byte_progress() -> Iterator[Callable[[str, float, float], None]]:
    """A progress bar, updated by a call with an activity, bytes done and bytes in total."""
    with console.progress_bar() as update:

        def report(activity: str, done: float, total: float) -> None:
            update(f"{activity} (MiB)", done / MEBIBYTE, total / MEBIBYTE)

        yield report


def _register_prepare(actions: Any) -> None:
    parser = actions.add_parser(
        "prepare",
        help="tokenise documents into shards",
        epilog="After an interruption, run the same command again to resume.",
    )
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or `builtin`"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="tokenizer.json to encode with"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder for the shards")
    parser.add_argument(
        "--validation",
        action="append",
        default=[],
        metavar="SOURCE",
        help="hold out the documents of this source instead of a fraction; may be repeated",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        metavar="FRACTION",
        help="fraction of the documents to hold out, from 0 to 1 (default: 0.005)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        metavar="N",
        help="tokens after which a new shard starts (default: 67108864)",
    )
    add_read_options(parser)
    parser.set_defaults(run=run_prepare)


def run_prepare(arguments: argparse.Namespace) -> int:
    from parcae.data.preparation import SHARD_TOKENS, Update, prepare, unsplit_note
    from parcae.data.sources import VALIDATION_FRACTION, find_files

    fraction, shard_tokens = arguments.validation_fraction, arguments.shard_tokens
    require(
        fraction is None or not arguments.validation,
        "--validation-fraction",
        "cannot be combined with --validation, which names all held-out documents",
        "Give one of the two.",
    )
    with byte_progress() as show:

        def report(update: Update) -> None:
            tokens = f", {console.format_count(update.tokens)} tokens" if update.tokens else ""
            show(f"{update.activity}{tokens}", update.source_bytes, update.total_bytes)

        prepared = prepare(
            arguments.sources,
            arguments.tokenizer,
            arguments.out,
            validation=arguments.validation,
            validation_fraction=VALIDATION_FRACTION if fraction is None else fraction,
            shard_tokens=SHARD_TOKENS if shard_tokens is None else shard_tokens,
            options=read_options(arguments),
            report=report,
        )
    options, files = read_options(arguments), find_files(arguments.sources)
    can_train = _print_prepared(prepared, options)
    if note := unsplit_note(files, options, prepared.documents_read):
        console.print_text(note, console=console.err)
    return 0 if can_train else 1


def _print_prepared(prepared: PreparedFolder, options: ReadOptions) -> bool:
    """Print what was written; returns whether a document is left to train on."""
    splits = prepared.table()
    rows = [
        (
            row["split"],
            f"{row['documents']:,}",
            f"{row['tokens']:,}",
            f"{row['text_bytes']:,}",
            f"{row['bytes_per_token']:.3f}" if row["tokens"] else "–",
            row["shards"],
        )
        for row in splits
    ]
    columns = ("split", "documents", "tokens", "bytes of text", "bytes per token", "shards")
    console.out.print(console.table(str(prepared.folder), columns, rows))
    skipped = prepared.skipped
    if any(skipped.values()):
        console.out.print(
            f"Skipped: {skipped['empty']:,} documents without text, "
            f"{skipped['held_out']:,} that are also in the validation sources."
        )
    if prepared.replaced:
        console.print_text(
            f"{prepared.replaced:,} characters of the text are U+FFFD, which stands for bytes that "
            "are not UTF-8. If these are many, convert the sources instead.",
            console=console.err,
        )
    documents = {row["split"]: row["documents"] for row in splits}
    if not documents["train"]:
        console.print_text(
            "All documents are held out for validation: none is left to train on. Use more "
            "documents, or a smaller --validation-fraction, and another or an empty --out.",
            console=console.err,
        )
    if not documents["validation"]:
        remedy = "Increase --validation-fraction to hold some out."
        if prepared.documents_read == 1:
            split = "" if options.splits else "split it with --separator or --document-start, or "
            remedy = f"The source is one document: {split}hold out other texts with --validation."
        console.print_text(
            f"No documents are held out for validation. {remedy}", console=console.err
        )
    return bool(documents["train"])


def _register_inspect(actions: Any) -> None:
    parser = actions.add_parser("inspect", help="statistics of shards, and rows packed from them")
    parser.add_argument("folder", metavar="FOLDER", help="folder written by `parcae data prepare`")
    parser.add_argument(
        "--context",
        type=int,
        default=512,
        metavar="TOKENS",
        help="context length to pack for, in tokens (default: 512)",
    )
    parser.add_argument(
        "--rows", type=int, default=8, metavar="N", help="packed rows to print (default: 8)"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="write lengths.png and inspect.json here (default: nothing)"
    )
    parser.add_argument(
        "--split",
        choices=("train", "validation"),
        default="train",
        help="documents to inspect (default: train)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="first check the checksum of every shard"
    )
    parser.set_defaults(run=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> int:
    from parcae.data.inspection import inspect
    from parcae.data.shards import ShardedDocuments

    shards = ShardedDocuments.open(arguments.folder, arguments.split)
    if arguments.verify:
        for _ in console.track(shards.verify(), "verifying", total=len(shards.records)):
            pass
        console.print_text(f"{arguments.folder}: all checksums of {arguments.split} are correct.")
    inspection = inspect(shards, arguments.context)
    print_inspection(inspection, arguments.rows)
    if arguments.out is not None:
        figure = inspection.save(arguments.out)
        console.print_text(f"Figure: {figure}")
    return 0


def print_inspection(inspection: Inspection, rows: int) -> None:
    """Print the statistics and the first packed rows."""
    rendered = inspection.render_rows(rows)
    _print_summary(inspection)
    cropped = inspection.summary.best_fit.cropped_share
    if cropped > CROPPED_WARNING:
        console.out.print(
            f"Best fit drops {cropped:.0%} of the tokens, because documents are long compared "
            "to a row. Use a longer context, data.split_long = true, or "
            "data.packing = 'concatenate'.",
            highlight=False,
        )
    for row in rendered:
        console.out.print(row, no_wrap=True, overflow="ellipsis")


def _print_summary(inspection: Inspection) -> None:
    summary = inspection.summary
    size = summary.bytes_per_token
    row = summary.context_length + 1
    console.out.print(
        console.table(
            "Documents",
            ["", ""],
            [
                ("documents", f"{summary.documents:,}"),
                ("tokens, with BOS", f"{summary.tokens:,}"),
                ("bytes per token", "unknown" if size is None else f"{size:.3f}"),
                ("tokens per document, mean", f"{summary.mean_length:,.1f}"),
                ("tokens per document, median", f"{summary.median_length:,.0f}"),
                ("tokens per document, maximum", f"{summary.longest:,}"),
                (f"documents longer than {row:,}", f"{summary.documents_longer_than_row:.1%}"),
                ("  their share of tokens", f"{summary.tokens_in_documents_longer_than_row:.1%}"),
            ],
        )
    )
    sampled = summary.sampled_documents < summary.documents
    note = f", sample of {summary.sampled_documents:,} documents" if sampled else ""
    methods = inspection.table()
    lines = [
        ("rows", [f"{m['rows']:,}" for m in methods]),
        ("documents per row", [f"{m['documents_per_row']:.2f}" for m in methods]),
        ("utilisation", [f"{m['utilisation']:.1%}" for m in methods]),
        ("tokens cropped", [f"{m['cropped_share']:.2%}" for m in methods]),
        ("tokens left over", [f"{m['leftover_share']:.2%}" for m in methods]),
        ("rows that start inside a document", [f"{1 - m['aligned_share']:.1%}" for m in methods]),
    ]
    console.out.print(
        console.table(
            f"Packed into rows of {row:,} tokens{note}",
            ["", "best fit", "best fit, split", "concatenation"],
            [(name, *cells) for name, cells in lines],
        )
    )


def _register_download(actions: Any) -> None:
    parser = actions.add_parser(
        "download",
        help="download a dataset of the Hugging Face hub, or the files of evaluation tasks",
        epilog="After an interruption, run the same command again to resume. Every file is "
        "verified by its checksum.",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a dataset such as fineweb-edu-10bt or owner/name:folder, or a suite of tasks: "
        f"{', '.join(DOWNLOADABLE)}",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder for the files")
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of the dataset (default: main)"
    )
    parser.add_argument(
        "--first-files", type=int, metavar="N", help="only the first N files (default: all)"
    )
    parser.add_argument(
        "--mirror",
        metavar="URL",
        help="download tasks from this address instead of their original repository",
    )
    parser.set_defaults(run=run_download)


def run_download(arguments: argparse.Namespace) -> int:
    from parcae.data.downloads import resolve

    if arguments.name in DOWNLOADABLE:
        return _download_tasks(arguments)
    resolve(arguments.name, DOWNLOADABLE)
    return _download_dataset(arguments)


def _download_dataset(arguments: argparse.Namespace) -> int:
    from parcae.data.downloads import download

    require(
        arguments.mirror is None,
        "--mirror",
        "not available for datasets",
        "To use another hub, set the environment variable HF_ENDPOINT.",
    )
    with _file_progress() as report:
        dataset = download(
            arguments.name,
            arguments.out,
            revision=arguments.revision,
            first_files=arguments.first_files,
            report=report,
        )
    count = len(dataset.files[: arguments.first_files])
    total = console.format_items(len(dataset.files), "file")
    console.out.print(
        f"{dataset.repository} at {dataset.commit[:12]}: {count} of {total} "
        f"downloaded and verified. "
        f"Next: parcae data prepare {arguments.out} --tokenizer ... --out ..."
    )
    return 0


def _download_tasks(arguments: argparse.Namespace) -> int:
    from parcae.evaluation.suites import files_of
    from parcae.evaluation.tasks import COLLECTION, download_tasks

    require(
        arguments.revision is None and arguments.first_files is None,
        "--revision, --first-files",
        "not available for task files, which are fixed",
        "Omit them.",
    )
    suite, out = arguments.name, arguments.out
    tasks = files_of(suite)
    with _file_progress() as report:
        download_tasks(tasks.files, out, collection=arguments.mirror or COLLECTION, report=report)
    count = console.format_items(len(tasks.files), "file")
    lines = [f"{suite}: {count} downloaded and verified, {console.format_bytes(tasks.bytes)}."]
    lines += [
        f"Not downloaded: {', '.join(names)} ({why})." for why, names in tasks.omitted.items()
    ]
    lines.append(f"Next: parcae eval CHECKPOINT --suites {suite} --task-data {out}")
    for line in lines:
        console.print_text(line)
    return 0


@contextmanager
def _file_progress() -> Iterator[Report]:
    """A bar per file on a terminal, and a line per complete file elsewhere."""
    with console.progress() as display:
        tasks: dict[str, Any] = {}

        def report(file: RemoteFile, done: int) -> None:
            if file.path not in tasks:
                total = file.bytes / MEBIBYTE
                tasks[file.path] = display.add_task(f"{file.path} (MiB)", total=total)
            display.update(tasks[file.path], completed=done / MEBIBYTE)
            if done == file.bytes and not console.err.is_terminal:
                size = console.format_bytes(file.bytes)
                console.print_text(f"{file.path}: {size}", console=console.err)

        yield report
