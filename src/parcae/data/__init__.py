"""From files of text to batches of tokens.

    parcae.data.train_tokenizer(["books/"], size=8192).save("tokenizer.json")
    parcae.data.prepare(["books/"], "tokenizer.json", "shards/")
    documents = parcae.data.ShardedDocuments.open("shards/")

A document passes through these modules, in this order:

    sources        find, open and hash files; which documents are held out
    readers        files of every format to documents
    preparation    documents to shards, resumable
    tokenizer      text to ids
    shards         tokenised documents on disk or in memory
    order          which documents and rows come next: shuffle, blocks, mixture
    packing        documents to rows
    loader         rows to batches, deterministic and resumable

Other modules:

    downloads            datasets of the Hugging Face hub, and single files
    tokenizer_growth     how much a tokenizer from elsewhere can lengthen a text
    tokenizer_training   train and compare tokenizers on files
    tokenizer_growth     how much a tokenizer from outside may lengthen a text
    inspection           measure prepared documents
    synthetic            tasks whose rows are drawn: walks, pointer chasing, modular arithmetic
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.data.downloads import download
    from parcae.data.inspection import inspect
    from parcae.data.loader import Batch, Loader, LoaderConfig, Source, validation_batches
    from parcae.data.preparation import prepare
    from parcae.data.readers import read_documents
    from parcae.data.shards import Documents, InMemoryDocuments, ShardedDocuments
    from parcae.data.sources import ReadOptions, find_files
    from parcae.data.tokenizer import Tokenizer
    from parcae.data.tokenizer_training import compare_tokenizers, train_tokenizer

TOKENIZER_FILE = "tokenizer.json"
"""The tokenizer in a folder of shards, a run, a checkpoint or a model folder."""

__all__ = [
    "Batch",
    "Documents",
    "InMemoryDocuments",
    "Loader",
    "LoaderConfig",
    "ReadOptions",
    "ShardedDocuments",
    "Source",
    "Tokenizer",
    "compare_tokenizers",
    "download",
    "find_files",
    "inspect",
    "prepare",
    "read_documents",
    "train_tokenizer",
    "validation_batches",
]

_MODULES = {
    "downloads": ("download",),
    "inspection": ("inspect",),
    "loader": ("Batch", "Loader", "LoaderConfig", "Source", "validation_batches"),
    "preparation": ("prepare",),
    "readers": ("read_documents",),
    "shards": ("Documents", "InMemoryDocuments", "ShardedDocuments"),
    "sources": ("ReadOptions", "find_files"),
    "tokenizer": ("Tokenizer",),
    "tokenizer_training": ("compare_tokenizers", "train_tokenizer"),
}


def __getattr__(name: str) -> Any:
    """Import a module when one of its names is first used."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"parcae.data.{module}"), name)
    raise AttributeError(f"module 'parcae.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
