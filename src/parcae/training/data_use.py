"""What a run uses of its data: the tokens that packing drops, and the epochs of its budget.

Where the sources are not tokenised yet, lengths are estimated from the bytes of the documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parcae import console
from parcae.data.loader import Loader
from parcae.data.order import BLOCK_DOCUMENTS, SourcePlan
from parcae.data.packing import BUFFER_DOCUMENTS, documents_as_packed
from parcae.data.readers import bytes_read, read_documents
from parcae.data.shards import MANIFEST, ShardedDocuments
from parcae.data.sources import find_files
from parcae.data.synthetic import task_of
from parcae.data.tokenizer import Tokenizer
from parcae.runs import find_checkpoint, find_tokenizer
from parcae.training.schedule import total_steps
from parcae.training.settings import Recipe

CROPPED_WARNING = 0.05
"""Share of cropped tokens above which a warning names the remedy."""
BYTES_PER_TOKEN = 3.5
"""Assumed where there is no tokenizer yet."""
SAMPLE_BYTES = 1 << 25
TOKENIZER_SAMPLE = 1 << 18
"""Characters that a tokenizer is tried on."""


@dataclass(frozen=True)
class SourceUse:
    """What a run uses of one source."""

    source: str
    documents: float
    """Before long ones are split."""
    tokens: float
    """Tokens of these documents."""
    dropped_share: float
    """Share of the tokens that packing drops in an epoch."""
    cropped_share: float
    """The part of it that is cropped from documents that do not fit."""
    epochs: float | None
    """Epochs of the rows that packing leaves; None for a budget in minutes."""
    split_long: bool = True
    """Whether documents longer than a row are split."""
    estimated: bool = False
    """Whether the source is not tokenised yet."""

    def describe(self) -> str:
        about = "about " if self.estimated else ""
        length = "" if self.epochs is None else f"; the budget is {about}{_epochs(self.epochs)}"
        return (
            f"Data: {self.source}, {about}{console.format_count(self.tokens)} tokens in "
            f"{about}{console.format_items(round(self.documents), 'document')}; "
            f"packing drops {about}{self.dropped_share:.1%}{length}."
        )

    def warning(self) -> str | None:
        """The remedy where documents are cropped much; None where they are not."""
        if self.cropped_share <= CROPPED_WARNING:
            return None
        split = not self.split_long
        remedy = (
            "Set data.split_long = true, or " if split else 'Set data.packing = "concatenate", or '
        )
        return (
            f"Warning: packing crops {self.cropped_share:.0%} of the tokens of {self.source} from "
            "documents that do not fit their rows; these are never trained on. "
            f"{remedy}use a longer model.context_length."
        )


def _epochs(epochs: float) -> str:
    text = console.format_number(epochs)
    return f"{text} epoch{'s' if text != '1' else ''}"


def use_of_loader(recipe: Recipe, loader: Loader) -> list[SourceUse]:
    """What a run uses of the sources of its loader, by the plans of their rows."""
    lengths = [source.documents.lengths for source in loader.sources]
    return [
        _use(recipe, number, plan, len(of_source), int(of_source.sum()))
        for number, (plan, of_source) in enumerate(zip(loader.plans, lengths, strict=True))
    ]


def planned_use(recipe: Recipe) -> list[SourceUse]:
    """The same before training; FileError or ConfigError where a source cannot be read."""
    if task_of(recipe.data.sources):
        return []  # rows are drawn as they are needed
    return [_planned(recipe, number) for number in range(len(recipe.data.sources))]


def _use(
    recipe: Recipe,
    number: int,
    plan: SourcePlan,
    documents: float,
    tokens: float,
    part: float = 1.0,
    estimated: bool = False,
) -> SourceUse:
    """`part` is the share of the source's training documents that the plan covers."""
    use, steps = plan.epoch_use(), total_steps(recipe)
    weights = recipe.data.weights or (1.0,) * len(recipe.data.sources)
    epochs = None
    if steps is not None and use.rows:
        rows = steps * recipe.data.global_batch * weights[number] / sum(weights)
        epochs = rows * part / use.rows
    return SourceUse(
        source=Path(recipe.data.sources[number]).name,
        documents=documents / part,
        tokens=tokens / part,
        dropped_share=use.cropped_share + use.leftover_share,
        cropped_share=use.cropped_share,
        epochs=epochs,
        split_long=recipe.data.split_long,
        estimated=estimated,
    )


def _planned(recipe: Recipe, number: int) -> SourceUse:
    source, data = recipe.data.sources[number], recipe.data
    part, estimated = 1.0, not (Path(source) / MANIFEST).exists()
    if estimated:
        lengths, part = _estimated_lengths(recipe, source)
        part /= 1 - data.validation_fraction
    else:
        lengths = ShardedDocuments.open(source).lengths
    row = recipe.model.context_length + 1
    packed = documents_as_packed(_Lengths(lengths), row, data.split_long, data.packing)
    plan = SourcePlan(
        name=source,
        order_key="plan",
        lengths=packed.lengths,
        capacity=row,
        buffer=BUFFER_DOCUMENTS,
        block_documents=BLOCK_DOCUMENTS,
        method=data.packing,
        seed=recipe.run.seed,
    )
    return _use(recipe, number, plan, len(lengths), int(lengths.sum()), part, estimated)


def _estimated_lengths(recipe: Recipe, source: str) -> tuple[np.ndarray, float]:
    """Lengths in tokens of the first documents of a source, and their share of its bytes."""
    files = find_files([source])
    total, read_until = sum(file.bytes for file in files), bytes_read(files)
    sizes: list[int] = []
    start, done = "", 0.0
    for document in read_documents(files, recipe.data.read_options):
        if document.text:
            sizes.append(len(document.text.encode()))
            start += document.text[: max(0, TOKENIZER_SAMPLE - len(start))]
        done = read_until(document)
        if sizes and done >= SAMPLE_BYTES:
            break
    ratio, tokenizer = BYTES_PER_TOKEN, recipe.data.tokenizer
    if recipe.start.checkpoint is not None:
        tokenizer = find_tokenizer(find_checkpoint(recipe.start.checkpoint))
    if tokenizer is not None and start:
        tokens = Tokenizer.load(tokenizer).encode(start)
        ratio = len(start.encode()) / len(tokens)
    lengths = 1 + np.ceil(np.array(sizes) / ratio).astype(np.int64)
    return lengths, min(1.0, max(done, 1.0) / total)


@dataclass(frozen=True)
class _Lengths:
    """Documents of which only the lengths are known."""

    lengths: np.ndarray
    fingerprint: str = ""

    def tokens(self, document: int) -> np.ndarray:
        raise AssertionError("packing reads lengths only")
