"""The data of a run, from the `[data]` table to rows.

`prepare_corpora` tokenises sources that are not shards into the run folder, once; `open_corpora`
opens the shards, so that every process and a resumed run read the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from parcae import console
from parcae.config import ConfigError, require
from parcae.data.loader import Batch, Loader, LoaderConfig, Source
from parcae.data.preparation import prepare
from parcae.data.shards import MANIFEST, ShardedDocuments, read_manifest
from parcae.data.sources import SPLITS, ReadOptions, find_files
from parcae.data.tokenizer import Tokenizer
from parcae.data.tokenizer_training import train_tokenizer
from parcae.evaluation.loss import held_out_batches, with_held_out_rows
from parcae.files import FileError
from parcae.runs.layout import DATA_FOLDER, METRICS_FILE, TOKENIZER_FILE
from parcae.training.settings import Recipe

TOKENIZER_CHARACTERS = 200_000_000
REPORTED_BYTES = 1 << 30
"""Size of shards from which checking them is reported; smaller ones take a moment."""


class TrainingData(Protocol):
    """What a `Learner` reads: `Corpora` in a run, random tokens where only speed is measured."""

    @property
    def tokenizer(self) -> Any: ...
    def loader(self, recipe: Recipe, rank: int = 0, world_size: int = 1) -> Any: ...
    def validation(self, recipe: Recipe, batch_rows: int) -> Iterator[Batch]: ...
    def can_validate(self, recipe: Recipe) -> bool: ...
    def bytes_of_token(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Corpora:
    """Folders of shards with their weights, and the tokenizer they have in common."""

    folders: tuple[Path, ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]
    tokenizer: Tokenizer

    def loader(self, recipe: Recipe, rank: int = 0, world_size: int = 1) -> Loader:
        parts = zip(self.folders, self.weights, self.names, strict=True)
        sources = [Source(ShardedDocuments.open(f), weight, name) for f, weight, name in parts]
        config = LoaderConfig(
            context_length=recipe.model.context_length,
            global_batch=recipe.data.global_batch,
            seed=recipe.run.seed,
            packing=recipe.data.packing,
            split_long=recipe.data.split_long,
            prefetch=recipe.data.prefetch,
        )
        return Loader(sources, config, rank, world_size)

    def validation(self, recipe: Recipe, batch_rows: int) -> Iterator[Batch]:
        """At most `validation_rows` held-out rows, taken evenly from the sources that have any."""
        return held_out_batches(
            self._held_out(recipe),
            recipe.model.context_length,
            batch_rows,
            recipe.run.validation_rows,
            recipe.data.packing,
            recipe.data.split_long,
        )

    def verify(self, rank: int, processes: int, report: Callable[[str], None]) -> None:
        """Verify the checksums of this process's part of the shards; FileError names a bad one."""
        manifests = {folder: read_manifest(folder) for folder in self.folders}
        stores = [
            ShardedDocuments.open(folder, split)
            for folder, manifest in manifests.items()
            for split in SPLITS
            if manifest["shards"][split]
        ]
        size = sum(record.bytes for store in stores for record in store.records)
        if size >= REPORTED_BYTES:
            report(
                f"Checking {console.format_bytes(size)} of shards "
                "(data.verify = false omits this) ..."
            )
        for store in stores:
            for _ in store.verify(rank, processes):
                pass

    def bytes_of_token(self) -> Tensor | None:
        """Bytes of each token, for bits per byte; None if the tokenizer is not byte-level."""
        if not self.tokenizer.is_byte_level:
            return None
        return torch.as_tensor(self.tokenizer.bytes_per_token())

    def can_validate(self, recipe: Recipe) -> bool:
        return bool(self._held_out(recipe))

    def _held_out(self, recipe: Recipe) -> list[Path]:
        """The folders whose held-out documents fill at least one row."""
        return with_held_out_rows(self.folders, recipe.model.context_length)


def prepare_corpora(recipe: Recipe, run: Path, report: Callable[[str], None]) -> None:
    """Train the tokenizer and tokenise the sources into the run folder, where that is not done.

    `report` is called with a message before each long operation. Only one process of a run may do
    this; all of them call `open_corpora` afterwards.
    """
    tokenizer = _find_tokenizer(recipe, run)
    if tokenizer is None:
        size = recipe.model.vocab_size
        names = ", ".join(recipe.data.sources)
        report(f"Training a tokenizer of {size:,} entries on {names} ...")
        tokenizer = train_tokenizer(
            recipe.data.sources,
            size,
            characters=TOKENIZER_CHARACTERS,
            document_cap=0,
            options=_read_options(recipe),
        )
    _check_vocabulary(tokenizer, recipe)
    tokenizer.save(run / TOKENIZER_FILE)
    for source, folder in _folders(recipe, run):
        if source == folder:
            _check_tokenizer(folder, tokenizer)
        elif not _is_in_use(run, folder):
            _tokenise(str(source), tokenizer, recipe, folder, report)


def open_corpora(recipe: Recipe, run: Path) -> Corpora:
    """The prepared data of a run; creates nothing."""
    tokenizer = _find_tokenizer(recipe, run)
    if tokenizer is None:
        raise FileError(f"{run / TOKENIZER_FILE}: no such file. The data is not prepared yet.")
    _check_vocabulary(tokenizer, recipe)
    folders = []
    for source, folder in _folders(recipe, run):
        if source == folder:
            _check_tokenizer(folder, tokenizer)
        folders.append(folder)
    sources = recipe.data.sources
    weights = recipe.data.weights or (1.0,) * len(sources)
    names = tuple(f"{number}:{Path(source).name}" for number, source in enumerate(sources))
    return Corpora(tuple(folders), weights, names, tokenizer)


def _folders(recipe: Recipe, run: Path) -> list[tuple[Path, Path]]:
    """(source, folder of its shards): a source that is a folder of shards is its own folder."""
    return [
        (path, path if (path / MANIFEST).exists() else run / DATA_FOLDER / str(number))
        for number, path in enumerate(map(Path, recipe.data.sources))
    ]


def _find_tokenizer(recipe: Recipe, run: Path) -> Tokenizer | None:
    """The tokenizer of a run that has started, of the recipe, of prepared sources, or of the run
    folder; None where one has to be trained."""
    in_run = (run / TOKENIZER_FILE).exists()
    if (run / METRICS_FILE).exists() and in_run:
        return Tokenizer.load(run / TOKENIZER_FILE)  # a resumed run keeps its tokenizer
    if recipe.data.tokenizer is not None:
        return Tokenizer.load(recipe.data.tokenizer)
    for source in map(Path, recipe.data.sources):
        if (source / MANIFEST).exists():
            return Tokenizer.load(source)
    return Tokenizer.load(run / TOKENIZER_FILE) if in_run else None


def _check_vocabulary(tokenizer: Tokenizer, recipe: Recipe) -> None:
    require(
        tokenizer.vocab_size <= recipe.model.vocab_size,
        "data.tokenizer",
        f"{tokenizer.vocab_size:,} entries do not fit model.vocab_size {recipe.model.vocab_size:,}",
        f"Use a smaller tokenizer, or --model.vocab_size {tokenizer.vocab_size}.",
    )


def _tokenise(
    source: str, tokenizer: Tokenizer, recipe: Recipe, folder: Path, report: Callable[[str], None]
) -> None:
    if not (folder / MANIFEST).exists():
        size = sum(file.bytes for file in find_files([source]))
        report(f"Tokenising {source} ({console.format_bytes(size)}) ...")
    prepare(
        [source],
        tokenizer,
        folder,
        validation_fraction=recipe.data.validation_fraction,
        options=_read_options(recipe),
    )


def _read_options(recipe: Recipe) -> ReadOptions:
    return ReadOptions(separator=recipe.data.separator)


def _is_in_use(run: Path, folder: Path) -> bool:
    """Whether a run has trained on these shards: it no longer needs their source."""
    return (run / METRICS_FILE).exists() and (folder / MANIFEST).exists()


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    if read_manifest(folder)["tokenizer"]["sha256"] != tokenizer.sha256:
        raise ConfigError(
            f"data.tokenizer: {folder} was prepared with another tokenizer. "
            "Prepare all sources with the same one, and give it as data.tokenizer or omit that."
        )
