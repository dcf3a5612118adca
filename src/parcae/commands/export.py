"""`parcae export`: a model as a folder for transformers, vLLM and the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "export", help="write a model as a folder for transformers, vLLM and the Hugging Face hub"
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a run, a checkpoint or a model folder"
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new folder to write")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer file or folder (default: the one of the checkpoint)",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="of a run, the checkpoint with the lowest validation loss (default: the newest)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="number format of the weights (default: float32)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.hub.export import export

    folder = export(
        arguments.checkpoint,
        arguments.folder,
        tokenizer=arguments.tokenizer,
        best=arguments.best,
        dtype=arguments.dtype,
    )
    console.print_text(f"wrote {folder}")
    return 0
