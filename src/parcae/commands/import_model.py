"""`parcae import`: a published model as a model folder of this package."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "import"


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        NAME,
        help="copy a published model, from the Hugging Face hub or a folder, into a model folder",
    )
    parser.add_argument(
        "source",
        metavar="REPOSITORY|FOLDER",
        help="repository of the hub such as SandyResearch/parcae-140m, or a folder, in the format "
        "of the reference release, of `parcae export` or of `parcae.save`",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new folder to write")
    parser.add_argument(
        "--revision", help="branch, tag or commit of the repository (default: its main branch)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.hub.import_model import import_model

    folder = import_model(arguments.source, arguments.folder, revision=arguments.revision)
    console.print_text(f"wrote {folder}")
    return 0
