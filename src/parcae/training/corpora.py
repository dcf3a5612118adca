"""From the `[data]` table to rows: shards are opened, other sources are tokenised into the run's
folder once, so that a resumed run and every process read the same bytes."""

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
from parcae.data.sources import SPLITS, find_files
from parcae.data.tokenizer import Tokenizer
from parcae.data.tokenizer_training import train_tokenizer
from parcae.evaluation.loss import held_out_batches, with_held_out_rows
from parcae.runs.layout import DATA_FOLDER, METRICS_FILE, TOKENIZER_FILE
from parcae.training.settings import Recipe

TOKENIZER_CHARACTERS = 200_000_000
WORTH_SAYING_BYTES = 1 << 30
"""Of shards to check: less takes a moment."""


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
    """What a run reads: folders of shards with their shares, and the tokenizer of all of them."""

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
        """At most `validation_rows` held-out rows, shared evenly by the sources that have any."""
        return held_out_batches(
            self._held_out(recipe),
            recipe.model.context_length,
            batch_rows,
            recipe.run.validation_rows,
            recipe.data.packing,
            recipe.data.split_long,
        )

    def verify(self, rank: int, processes: int, say: Callable[[str], None]) -> None:
        """Read every shard, each process its part; an error names the first that is damaged."""
        manifests = {folder: read_manifest(folder) for folder in self.folders}
        stores = [
            ShardedDocuments.open(folder, split)
            for folder, manifest in manifests.items()
            for split in SPLITS
            if manifest["shards"][split]
        ]
        size = sum(record.bytes for store in stores for record in store.records)
        if size >= WORTH_SAYING_BYTES:
            say(
                f"Checking {console.format_bytes(size)} of shards "
                "(data.verify = false omits this) ..."
            )
        for store in stores:
            for _ in store.verify(rank, processes):
                pass

    def bytes_of_token(self) -> Tensor | None:
        """For bits per byte; None where the tokenizer's entries are not bytes."""
        if not self.tokenizer.is_byte_level:
            return None
        return torch.as_tensor(self.tokenizer.bytes_per_token())

    def can_validate(self, recipe: Recipe) -> bool:
        return bool(self._held_out(recipe))

    def _held_out(self, recipe: Recipe) -> list[Path]:
        """The folders whose held-out documents fill at least one row."""
        return with_held_out_rows(self.folders, recipe.model.context_length)


def open_corpora(recipe: Recipe, run: Path, say: Callable[[str], None] | None = None) -> Corpora:
    """What the recipe names. The process that can `say` things makes what is not there yet; the
    others of a run come after it."""
    sources = recipe.data.sources
    prepared = {source: Path(source) for source in sources if (Path(source) / MANIFEST).exists()}
    tokenizer = _tokenizer(recipe, run, prepared, say)
    require(
        tokenizer.vocab_size <= recipe.model.vocab_size,
        "data.tokenizer",
        f"{tokenizer.vocab_size:,} entries do not fit model.vocab_size {recipe.model.vocab_size:,}",
        f"Use a smaller tokenizer, or --model.vocab_size {tokenizer.vocab_size}.",
    )
    if say is not None:
        tokenizer.save(run / TOKENIZER_FILE)
    folders = []
    for number, source in enumerate(sources):
        if source in prepared:
            _check_tokenizer(prepared[source], tokenizer)
            folders.append(prepared[source])
        else:
            folders.append(run / DATA_FOLDER / str(number))
            if say is not None and not _is_settled(run, folders[-1]):
                _tokenise(source, tokenizer, recipe, folders[-1], say)
    weights = recipe.data.weights or (1.0,) * len(sources)
    names = tuple(f"{number}:{Path(source).name}" for number, source in enumerate(sources))
    return Corpora(tuple(folders), weights, names, tokenizer)


def _tokenizer(
    recipe: Recipe, run: Path, prepared: dict[str, Path], say: Callable[[str], None] | None
) -> Tokenizer:
    if (run / METRICS_FILE).exists() and (run / TOKENIZER_FILE).exists():
        return Tokenizer.load(run / TOKENIZER_FILE)  # the run goes on with what it began with
    if recipe.data.tokenizer is not None:
        return Tokenizer.load(recipe.data.tokenizer)
    if prepared:
        return Tokenizer.load(next(iter(prepared.values())))
    if (run / TOKENIZER_FILE).exists():
        return Tokenizer.load(run / TOKENIZER_FILE)
    size = recipe.model.vocab_size
    assert say is not None, "the first process trains the tokenizer"
    say(f"Training a tokenizer of {size:,} entries on {', '.join(recipe.data.sources)} ...")
    return train_tokenizer(
        recipe.data.sources, size, characters=TOKENIZER_CHARACTERS, document_cap=0
    )


def _tokenise(
    source: str, tokenizer: Tokenizer, recipe: Recipe, folder: Path, say: Callable[[str], None]
) -> None:
    if not (folder / MANIFEST).exists():
        size = sum(file.bytes for file in find_files([source]))
        say(f"Tokenising {source} ({console.format_bytes(size)}) ...")
    prepare([source], tokenizer, folder, validation_fraction=recipe.data.validation_fraction)


def _is_settled(run: Path, folder: Path) -> bool:
    """A run that has trained on these shards needs their source no more, which may be gone."""
    return (run / METRICS_FILE).exists() and (folder / MANIFEST).exists()


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    if read_manifest(folder)["tokenizer"]["sha256"] != tokenizer.sha256:
        raise ConfigError(
            f"data.tokenizer: {folder} was prepared with another tokenizer. "
            "Prepare all sources with the same one, and name it or leave data.tokenizer out."
        )
