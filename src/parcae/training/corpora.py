"""The data of a run, from the `[data]` table to rows.

`prepare_corpora` tokenises sources that are not shards into the run folder, once; `open_corpora`
opens the shards, so that every process and a resumed run read the same bytes.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from parcae import console
from parcae.config import ConfigError, require
from parcae.data.loader import (
    Batch,
    Loader,
    LoaderConfig,
    Source,
    held_out_batches,
    with_held_out_rows,
)
from parcae.data.preparation import prepare, unsplit_note
from parcae.data.shards import (
    LARGEST_LIST,
    MANIFEST,
    SOURCES,
    ShardedDocuments,
    fingerprint,
    read_manifest,
)
from parcae.data.sources import BUILTIN, SPLITS, digest_files, find_files
from parcae.data.synthetic import Task, TaskLoader, task_of
from parcae.data.tokenizer import Tokenizer
from parcae.data.tokenizer_training import train_tokenizer
from parcae.files import FileError, interpreting, read_json
from parcae.runs import find_checkpoint, find_tokenizer
from parcae.runs.layout import METRICS_FILE, TOKENIZER_FILE, shard_folders
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
    def fingerprints(self) -> list[dict[str, str]]: ...


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

    def fingerprints(self) -> list[dict[str, str]]:
        """What identifies the documents of each source, by split."""
        manifests = map(read_manifest, self.folders)
        return [{split: fingerprint(manifest, split) for split in SPLITS} for manifest in manifests]

    def _held_out(self, recipe: Recipe) -> list[Path]:
        """The folders whose held-out documents fill at least one row."""
        return with_held_out_rows(self.folders, recipe.model.context_length)


@dataclass(frozen=True)
class TaskCorpus:
    """A synthetic task, whose rows are drawn when they are needed."""

    task: Task
    folders: tuple[Path]
    """Its name, where `Corpora` has folders."""
    tokenizer: Tokenizer

    def loader(self, recipe: Recipe, rank: int = 0, world_size: int = 1) -> TaskLoader:
        return TaskLoader(self.task, recipe.data.global_batch, recipe.run.seed, rank, world_size)

    def validation(self, recipe: Recipe, batch_rows: int) -> Iterator[Batch]:
        return self.task.held_out(recipe.run.validation_rows, batch_rows)

    def verify(self, rank: int, processes: int, report: Callable[[str], None]) -> None:
        """Nothing is stored."""

    def can_validate(self, recipe: Recipe) -> bool:
        return True

    def bytes_of_token(self) -> None:
        return None

    def fingerprints(self) -> list[dict[str, str]]:
        return [dict.fromkeys(SPLITS, self.task.fingerprint)]


def prepare_corpora(recipe: Recipe, run: Path, report: Callable[[str], None]) -> None:
    """Train the tokenizer and tokenise the sources into the run folder, where that is not done.

    A run that has trained keeps its tokenizer and its shards. `report` is called with a message
    before each long operation. Only one process of a run may do this; all of them call
    `open_corpora` afterwards.
    """
    if task := task_of(recipe.data.sources):
        _check_task(task, recipe)
        task.tokenizer().save(run / TOKENIZER_FILE)
        return
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
            options=recipe.data.read_options,
        )
    _check_vocabulary(tokenizer, recipe)
    tokenizer.save(run / TOKENIZER_FILE)
    for source, folder in _folders(recipe, run):
        if source == folder:
            _check_tokenizer(folder, tokenizer)
        elif not (_has_trained(run) and (folder / MANIFEST).exists()):
            if _has_trained(run) and str(source) != BUILTIN and not glob.glob(str(source)):
                raise FileError(
                    f"data.sources: {source}: no such file or folder, and the run has no copy of "
                    "its tokens. If it was moved, give its new path with `data.sources`."
                )
            _tokenise(str(source), tokenizer, recipe, folder, report)


def check_sources(recipe: Recipe) -> None:
    """Refuse sources that do not exist, before anything is written."""
    if task := task_of(recipe.data.sources):
        _check_task(task, recipe)
        return
    for source in recipe.data.sources:
        if not (Path(source) / MANIFEST).exists():
            find_files([source])


def open_corpora(recipe: Recipe, run: Path) -> Corpora | TaskCorpus:
    """The prepared data of a run; creates nothing."""
    if not (run / TOKENIZER_FILE).exists():
        raise FileError(f"{run / TOKENIZER_FILE}: no such file. The data is not prepared yet.")
    tokenizer = Tokenizer.load(run / TOKENIZER_FILE)
    _check_vocabulary(tokenizer, recipe)
    if task := task_of(recipe.data.sources):
        return TaskCorpus(task, (Path(recipe.data.sources[0]),), tokenizer)
    folders = [folder for _, folder in _folders(recipe, run)]
    for folder in folders:
        _check_tokenizer(folder, tokenizer)
    sources = recipe.data.sources
    weights = recipe.data.weights or (1.0,) * len(sources)
    names = tuple(f"{number}:{Path(source).name}" for number, source in enumerate(sources))
    return Corpora(tuple(folders), weights, names, tokenizer)


def check_moved(recipe: Recipe, before: Recipe, run: Path) -> None:
    """Refuse new paths of a tokenizer or of files that hold something else than the run used.

    Shards are compared by `check_same_data`.
    """
    tokenizer, sources = recipe.data.tokenizer, recipe.data.sources
    if tokenizer is not None and tokenizer != before.data.tokenizer:
        require(
            Tokenizer.load(tokenizer).sha256 == Tokenizer.load(run / TOKENIZER_FILE).sha256,
            "data.tokenizer",
            f"{tokenizer} is not the tokenizer of the run in {run}",
            "Omit the setting: the run has a copy of its tokenizer.",
        )
    require(
        len(sources) == len(before.data.sources),
        "data.sources",
        f"{len(sources)} given, but the run in {run} has {len(before.data.sources)}",
        "Give the new path of each, in the same order.",
    )
    folders = zip(_folders(recipe, run), before.data.sources, strict=True)
    for (source, folder), old in folders:
        if str(source) not in (str(folder), old) and (folder / SOURCES).exists():
            try:
                digests = [digest for _, digest in digest_files(find_files([source]), {}).values()]
            except FileError:
                continue  # it is gone, and the run does not need it
            with interpreting(folder / SOURCES, "Was it edited?"):
                trained_on = [
                    entry["sha256"] for entry in read_json(folder / SOURCES, LARGEST_LIST)
                ]
            require(
                digests == trained_on,
                "data.sources",
                f"{source} has other contents than {old}, on which the run in {run} was trained",
                "Omit the setting: the run has a copy of its tokens.",
            )


def check_same_data(
    corpora: Corpora | TaskCorpus, used: Sequence[Mapping[str, str]], run: Path
) -> None:
    """Refuse shards that do not have the fingerprints of those the run has used."""
    for folder, now, before in zip(corpora.folders, corpora.fingerprints(), used, strict=True):
        for split in SPLITS:
            require(
                now[split] == before[split],
                "data.sources",
                f"the {split} documents in {folder} are not those of the run in {run} "
                f"(fingerprint {now[split][:12]} instead of {before[split][:12]})",
                "Give the path of the data it was trained on with `data.sources`.",
            )


def _folders(recipe: Recipe, run: Path) -> list[tuple[Path, Path]]:
    """(source, folder of its shards): a source that is a folder of shards is its own folder."""
    sources = [Path(source) for source in recipe.data.sources]
    return list(zip(sources, shard_folders(run, sources), strict=True))


def check_planned_tokenizer(recipe: Recipe) -> None:
    """Refuse a tokenizer that does not fit the model; nothing is checked where it has to be trained
    first."""
    if task := task_of(recipe.data.sources):
        _check_task(task, recipe)
        return
    tokenizer = _find_tokenizer(recipe, None)
    if tokenizer is not None:
        _check_vocabulary(tokenizer, recipe)


def _find_tokenizer(recipe: Recipe, run: Path | None) -> Tokenizer | None:
    """The tokenizer of a run that has trained, of the weights it starts from, of the recipe, of
    prepared sources, or of the run folder; None where one has to be trained."""
    own = None if run is None else run / TOKENIZER_FILE
    if own is not None and not own.exists():
        own = None
    if own is not None and _has_trained(own.parent):
        return Tokenizer.load(own)
    prepared = (source for source in recipe.data.sources if (Path(source) / MANIFEST).exists())
    path = recipe.data.tokenizer or next(prepared, None)
    if recipe.start.checkpoint is not None:
        return _tokenizer_of_weights(find_checkpoint(recipe.start.checkpoint), path)
    if path is not None:
        return Tokenizer.load(path)
    return None if own is None else Tokenizer.load(own)


def _tokenizer_of_weights(folder: Path, path: str | None) -> Tokenizer:
    """The tokenizer beside the weights; one that the recipe or its shards name must be the same."""
    named = None if path is None else Tokenizer.load(path)
    try:
        own = find_tokenizer(folder)
    except FileError:
        require(
            named is not None,
            "data.tokenizer",
            f"missing, and there is none beside the weights in {folder}",
            "Give the tokenizer they were trained with.",
        )
        return cast(Tokenizer, named)
    tokenizer = Tokenizer.load(own)
    require(
        named is None or named.sha256 == tokenizer.sha256,
        "data.tokenizer",
        f"{path} has another tokenizer than the weights in {folder}",
        f"Omit data.tokenizer, and prepare shards with --tokenizer {own}.",
    )
    return tokenizer


def _check_task(task: Task, recipe: Recipe) -> None:
    _check_vocabulary(task.tokenizer(), recipe)
    source, length = recipe.data.sources[0], recipe.model.context_length
    require(
        task.length <= length,
        "model.context_length",
        f"{length}, but the rows of {source} have {task.length} tokens",
        f"Use {task.length}.",
    )
    require(
        recipe.data.tokenizer is None and recipe.start.checkpoint is None,
        "data.tokenizer" if recipe.data.tokenizer else "start.checkpoint",
        f"given, but {source} has a vocabulary of its own",
        "Omit it.",
    )


def _check_vocabulary(tokenizer: Tokenizer, recipe: Recipe) -> None:
    require(
        tokenizer.vocab_size <= recipe.model.vocab_size,
        "data.tokenizer",
        f"{tokenizer.vocab_size:,} entries do not fit model.vocab_size {recipe.model.vocab_size:,}",
        f"Use a smaller tokenizer, or model.vocab_size = {tokenizer.vocab_size}.",
    )


def _tokenise(
    source: str, tokenizer: Tokenizer, recipe: Recipe, folder: Path, report: Callable[[str], None]
) -> None:
    files = find_files([source])
    if not (folder / MANIFEST).exists():
        size = sum(file.bytes for file in files)
        report(f"Tokenising {source} ({console.format_bytes(size)}) ...")
    options = recipe.data.read_options
    prepared = prepare(
        [source],
        tokenizer,
        folder,
        validation_fraction=recipe.data.validation_fraction,
        options=options,
    )
    if note := unsplit_note(files, options, prepared.documents_read):
        report(f"data.sources: {note}")


def _has_trained(run: Path) -> bool:
    """Whether a run has begun: it keeps its tokenizer, and no longer needs what it tokenised."""
    return (run / METRICS_FILE).exists()


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    if read_manifest(folder)["tokenizer"]["sha256"] != tokenizer.sha256:
        raise ConfigError(
            f"data.tokenizer: {folder} was prepared with another tokenizer. "
            "Prepare all sources with the same one, and give it as data.tokenizer or omit that."
        )
