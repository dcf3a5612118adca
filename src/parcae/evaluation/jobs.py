"""A job is one measurement over many items: a task at one seed, a text, a run's held-out rows.

    for count, records in job.score(scorer, is_done):      scores what is not done, batch by batch
    job.summarise(records, depth_index)                    the metrics at one depth

A record is what is kept of one item, as JSON; lists in it have one entry per depth. Where the model
diverged at a depth, the entry is null, the record has the index of the depth in `lost`, and the
metrics of that depth are None. `PromptJob` is the base class of the jobs whose items are prompts.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from parcae.data.sources import ReadOptions
from parcae.evaluation.metrics import mean
from parcae.evaluation.prompts import Answer, Prompt
from parcae.evaluation.scorer import Scorer
from parcae.evaluation.shared_prefix import batches
from parcae.files import FileError, reading, sha256, to_json

Record = dict[str, Any]

BLOCK_ITEMS = 512
"""Prompts in memory at once."""
COST_SAMPLES = 4
"""Items whose cost is computed to estimate that of all."""


class Job(Protocol):
    @property
    def unit(self) -> tuple[str, str]:
        """What an item is called: one, several."""
        ...

    @property
    def name(self) -> str:
        """Identifies the measurement in the samples."""
        ...

    @property
    def seed(self) -> int | None:
        """Seed of the few-shot examples; None where nothing is drawn."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the data, and of what decides its items."""
        ...

    def __len__(self) -> int:
        """Number of items."""
        ...

    def cost(self, scorer: Scorer) -> float:
        """Estimate of the tokens to compute per item."""
        ...

    def score(
        self, scorer: Scorer, is_done: Callable[[int], bool]
    ) -> Iterator[tuple[int, Mapping[int, Record]]]:
        """Yield, batch by batch, the number of items and their new records by index; no records
        for a batch of which every item is done."""
        ...

    def describe(self, records: Sequence[Record]) -> dict[str, Any]:
        """What was measured on which data, for the result."""
        ...

    def summarise(self, records: Sequence[Record], depth_index: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class DataFile:
    """The file a measurement is made on."""

    path: Path
    split: str
    stand_in: bool = False
    """Whether it is a part or a reconstruction of the original data."""
    options: ReadOptions = field(default_factory=ReadOptions)
    """How it is cut into documents."""

    @cached_property
    def sha256(self) -> str:
        """Checksum of the uncompressed content: a file and its .gz are the same data."""
        if self.path.suffix != ".gz":
            return sha256(self.path)
        try:
            with reading(self.path), gzip.open(self.path) as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except (EOFError, zlib.error) as error:
            raise FileError(
                f"{self.path}: not a complete gzip file ({error}). Download it again."
            ) from None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content and how it is cut into documents."""
        chosen = self._chosen_options()
        if not chosen:
            return self.sha256
        cut = chosen["separator"] if chosen.keys() == {"separator"} else to_json(chosen)
        return hashlib.sha256(f"{self.sha256}\n{cut}".encode()).hexdigest()

    def _chosen_options(self) -> dict[str, Any]:
        """The options that are not the default."""
        default = vars(ReadOptions())
        return {name: v for name, v in vars(self.options).items() if v != default[name]}

    def describe(self) -> dict[str, Any]:
        chosen = self._chosen_options()
        cut = {**chosen, "fingerprint": self.fingerprint} if chosen else {}
        return {
            "file": str(self.path),
            "split": self.split,
            "stand_in": self.stand_in,
            "sha256": self.sha256,
            **cut,
        }


class PromptJob(ABC):
    """A job whose items are prompts, scored in batches of the scorer's size."""

    name: str
    unit = ("item", "items")
    seed: int | None = None
    source: DataFile

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def prompt(self, index: int, scorer: Scorer) -> Prompt:
        """The prompt of one item."""

    @abstractmethod
    def record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        """What is kept of one item."""

    @abstractmethod
    def summarise(self, records: Sequence[Record], depth_index: int) -> dict[str, Any]: ...

    def cost(self, scorer: Scorer) -> float:
        """The mean of a few items at even distances."""
        count = min(COST_SAMPLES, len(self))
        prompts = [self.prompt(i * len(self) // count, scorer) for i in range(count)]
        return sum(map(scorer.cost, prompts)) / count

    def score(
        self, scorer: Scorer, is_done: Callable[[int], bool]
    ) -> Iterator[tuple[int, Mapping[int, Record]]]:
        """Batches are planned over all items of a block, done or not, so that a resumed evaluation
        computes exactly the batches of an uninterrupted one."""
        for start in range(0, len(self), BLOCK_ITEMS):
            indices = range(start, min(start + BLOCK_ITEMS, len(self)))
            if all(map(is_done, indices)):
                yield len(indices), {}
                continue
            prompts = [self.prompt(index, scorer) for index in indices]
            costs = [scorer.cost(prompt) for prompt in prompts]
            for batch in batches(costs, scorer.batch_tokens):
                chosen = {indices[i]: prompts[i] for i in batch}
                new = {} if all(map(is_done, chosen)) else self._score_batch(chosen, scorer)
                yield len(batch), new

    def _score_batch(self, prompts: Mapping[int, Prompt], scorer: Scorer) -> dict[int, Record]:
        seeds = [state_seed(self.seed, index) for index in prompts]
        answers = scorer.score(list(prompts.values()), seeds)
        return {
            index: self._complete_record(index, prompt, of_item)
            for (index, prompt), of_item in zip(prompts.items(), answers, strict=True)
        }

    def _complete_record(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Record:
        diverged = sorted({depth for answer in answers for depth in answer.diverged()})
        return without_diverged(self.record(index, prompt, answers), diverged)

    def describe(self, records: Sequence[Record]) -> dict[str, Any]:
        """The file, the number of items, the share of prompts that were too long, and the share of
        those where the tokenizer joined the end of the question and the beginning of the answer."""
        extent: dict[str, Any] = {"scored": len(self)}
        if "cut" in records[0]:
            extent["share_cut"] = mean([float(record["cut"]) for record in records])
        if any("unaligned" in record for record in records):
            extent["share_unaligned"] = mean([float("unaligned" in record) for record in records])
        return {**self.source.describe(), **extent}


def state_seed(seed: int | None, index: int) -> int:
    """The seed of an item's initial state, where it is drawn."""
    return (seed or 0) * 1_000_003 + index


def without_diverged(record: Record, diverged: Sequence[int]) -> Record:
    """A record with null at the indices of the numbers of loops where the model diverged."""
    if not diverged:
        return record
    masked = {
        key: [None if i in diverged else entry for i, entry in enumerate(value)]
        if isinstance(value, list)
        else value
        for key, value in record.items()
    }
    return masked | {"lost": list(diverged)}


def summary(job: Job, records: Sequence[Record], depth_index: int) -> dict[str, Any] | None:
    """The metrics of a job at one depth; None where the model diverged."""
    if any(depth_index in record.get("lost", ()) for record in records):
        return None
    return job.summarise(records, depth_index)
