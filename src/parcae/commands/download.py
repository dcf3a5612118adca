"""`parcae data download`: a dataset of the Hugging Face hub, or the files of evaluation tasks."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from parcae import console
from parcae.config import require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parcae.data.hub import RemoteFile, Report


def register(actions: Any) -> None:
    parser = actions.add_parser(
        "download",
        help="fetch a dataset of the Hugging Face hub, or the files of evaluation tasks",
        epilog="An interrupted download goes on when it is started again; every file is verified.",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a dataset such as fineweb-edu-10bt or owner/name:folder, or the tasks of a suite: "
        "core, core-extended, zero-shot or lambada",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: main)")
    parser.add_argument("--first-files", type=int, metavar="N", help="only the first N files")
    parser.add_argument("--mirror", metavar="URL", help="of the folder that tasks are fetched from")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae.data.hub import resolve
    from parcae.evaluation.download import SUITES

    if arguments.name in SUITES:
        return _download_tasks(arguments)
    resolve(arguments.name, SUITES)
    return _download_dataset(arguments)


def _download_dataset(arguments: argparse.Namespace) -> int:
    from parcae.data.hub import download

    require(
        arguments.mirror is None,
        "--mirror",
        "means nothing for a dataset of the hub",
        "Name another hub by the environment's HF_ENDPOINT.",
    )
    with _showing() as report:
        dataset = download(
            arguments.name,
            arguments.out,
            revision=arguments.revision,
            first_files=arguments.first_files,
            report=report,
        )
    count = len(dataset.files[: arguments.first_files])
    console.out.print(
        f"{dataset.repository} at {dataset.commit[:12]}: {count} of {len(dataset.files)} files "
        f"here and verified. Next: parcae data prepare {arguments.out} --tokenizer ... --out ..."
    )
    return 0


def _download_tasks(arguments: argparse.Namespace) -> int:
    from parcae.evaluation.download import COLLECTION, download_tasks, wanted

    require(
        arguments.revision is None and arguments.first_files is None,
        "--revision, --first-files",
        "mean nothing for the files of tasks, which are fixed",
        "Leave them out.",
    )
    suite, out = arguments.name, arguments.out
    found = wanted(suite)
    with _showing() as report:
        download_tasks(found.files, out, collection=arguments.mirror or COLLECTION, report=report)
    count = "1 file" if len(found.files) == 1 else f"{len(found.files)} files"
    lines = [f"{suite}: {count} here and verified, {console.format_bytes(found.bytes)}."]
    lines += [f"Not fetched: {', '.join(names)} ({why})." for why, names in found.left_out.items()]
    lines.append(f"Next: parcae eval CHECKPOINT --suite {suite} --eval-data {out}")
    for line in lines:
        console.out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


@contextmanager
def _showing() -> Iterator[Report]:
    """A bar for each file on a terminal, a line for each that is whole elsewhere."""
    with console.progress() as display:
        tasks: dict[str, Any] = {}

        def report(file: RemoteFile, here: int) -> None:
            if file.path not in tasks:
                tasks[file.path] = display.add_task(f"{file.path} (MiB)", total=file.bytes / 2**20)
            display.update(tasks[file.path], completed=here / 2**20)
            if here == file.bytes and not console.err.is_terminal:
                console.err.print(
                    f"{file.path}: {console.format_bytes(file.bytes)}", highlight=False
                )

        yield report
