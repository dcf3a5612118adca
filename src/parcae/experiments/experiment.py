"""What an experiment is: the runs it needs, what it measures on them, what it draws and decides.

To try an idea, copy one of the modules of this package, change the three parts, and add it to
`CATALOGUE` in `parcae.experiments.reproduce`:

    class MyIdea(Experiment):
        name = "my-idea"

        def runs(self, scale):
            for seed in scale.seeds:
                for sampler in ("poisson", "fixed"):
                    tree = scale.text(model={"loop": {"sampler": sampler}})
                    yield Run(scale.recipe(tree, seed), {"sampler": sampler, "seed": seed})

        def claims(self, results):
            return [Claim("...", lower(results.loss(8, sampler="poisson"),
                                       results.loss(8, sampler="fixed")))]

        def draw(self, results, path): ...
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from parcae.data.synthetic import PREFIX, find_task
from parcae.evaluation.run import evaluate
from parcae.experiments.scales import Scale
from parcae.experiments.verdicts import Claim, describe
from parcae.runs import read_metrics, read_result
from parcae.runs.layout import list_steps
from parcae.schema import shorten
from parcae.training.settings import Recipe

if TYPE_CHECKING:
    from parcae.experiments.store import Store

FORMAT = 2
"""Part of the key of a run; raised when the same recipe begins to train something else, as it does
when the default of a setting changes."""
NOT_LEARNED = {
    "data": {"prefetch", "verify"},
    "run": {
        "device",
        "parallel",
        "compile",
        "checkpoint_every",
        "keep_last",
        "keep_best",
        "trackers",
    },
}
"""Settings that change neither what is learned, up to rounding, nor what is measured: not part of
the key."""
ARTICLES = 6
"""Of WikiText-2's test set: 10 % of its words."""
FEW_SHOT_CONTEXT = 512
"""Tokens of context below which few-shot prompts do not fit, so that CORE is not measured."""
FEW_ITEMS = 100
"""Items of each zero-shot task for models with less context; they guess, and few items show it."""
OVERLAPPING = {"sciq": "text:expository"}
"""Tasks whose questions were written from a training text (19 % of SciQ's from the textbooks)."""
CURVE_POINTS = 60
"""Points that are kept of a curve over training."""

Row = dict[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Names of columns, and rows of cells."""


@dataclass(frozen=True)
class Run:
    """A training run: its recipe, and what distinguishes it from the others of the experiment."""

    recipe: Recipe
    labels: Mapping[str, Any]

    @property
    def source(self) -> str:
        return self.recipe.data.sources[0]

    @cached_property
    def key(self) -> str:
        """A hash of everything that decides what is learned: equal recipes are one run."""
        tree = changed_settings(self.recipe)
        for table, names in NOT_LEARNED.items():
            tree[table] = {k: v for k, v in tree[table].items() if k not in names}
        if self.source.startswith(PREFIX):
            tree["data"]["sources"] = [repr(find_task(self.source))]
        text = json.dumps([FORMAT, tree], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_settings(config: Any) -> dict[str, Any]:
    """The settings that differ from their defaults; a setting added later changes no key."""
    tree = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            tree[field.name] = changed_settings(value)
        elif value != field.default:
            tree[field.name] = value
    return tree


@dataclass(frozen=True)
class Results:
    """The measured runs of an experiment, one row each: labels, cost and measurements."""

    rows: Sequence[Row]
    planned: int

    def where(self, **labels: Any) -> list[Row]:
        """The rows with these labels."""
        return [row for row in self.rows if all(row.get(k) == v for k, v in labels.items())]

    def values(self, label: str, **labels: Any) -> list[Any]:
        """The different values of a label, in the order of the plan."""
        return list(dict.fromkeys(row[label] for row in self.where(**labels) if label in row))

    def loss(self, loops: int, /, **labels: Any) -> dict[int, float]:
        """Held-out loss at a number of loops by seed; infinite for a run that diverged."""
        return {row["seed"]: loss_at(row, loops) for row in self.where(**labels)}

    @property
    def core_minutes(self) -> float:
        return sum(row["core_minutes"] for row in self.rows)

    def check(self) -> None:
        """Raise an error of a wrong value or type unless every row has its key and its cost."""
        if not isinstance(self.planned, int):
            raise ValueError(f"planned is {shorten(self.planned)}")
        for row in self.rows:
            if not (isinstance(row["key"], str) and isinstance(row["core_minutes"], int | float)):
                raise ValueError("the key or the core_minutes of a run")


def loss_at(row: Row, loops: int) -> float:
    """Nats per token on held-out rows, in `row` after `loops` loops; a Transformer has one."""
    losses = row["losses"]
    value = losses.get(str(loops), losses.get("1") if len(losses) == 1 else None)
    return math.inf if value is None else value


class Experiment(ABC):
    """One table or figure of the paper, or one question beyond it."""

    name: ClassVar[str]
    title: ClassVar[str]
    in_paper: ClassVar[str]
    """Where the paper has it, or "beyond the paper"."""
    paper: ClassVar[str]
    """The paper's numbers, in Markdown."""

    @abstractmethod
    def runs(self, scale: Scale) -> Iterator[Run]:
        """The runs it needs, the first seed of all of them first."""

    def measure(self, run: Run, store: Store) -> Row:
        """What is kept of a run that has ended; by default its losses and curves."""
        return training_record(store.folder(run))

    def measure_texts(self, texts: Path, folder: Path) -> list[Row]:
        """Rows of an experiment that trains no model: measured on texts, with files in `folder`."""
        return []

    @abstractmethod
    def claims(self, results: Results) -> list[Claim]:
        """The verdicts."""

    def table(self, results: Results) -> Table:
        """Our numbers: names of columns, and rows of cells."""
        return (), []

    @abstractmethod
    def draw(self, results: Results, path: Path) -> Path:
        """Draw the figure of the results, which may be incomplete, to a file."""


RECORDED = ("status", "parameters", "tokens", "flops", "losses", "spikes", "training", "telemetry")
"""What `training_record` measures."""


def training_record(folder: Path) -> Row:
    """Status, held-out losses by number of loops, spikes, and curves over training of a run."""
    result = read_result(folder)
    metrics = read_metrics(folder)
    training, telemetry = metrics.get("train", []), metrics.get("telemetry", [])
    losses = {} if result is None else {str(t): loss for t, loss in result.losses.items()}
    diverged = result is not None and result.status == "diverged"
    return {
        "status": getattr(result, "status", None),
        "parameters": getattr(result, "parameters", None),
        "tokens": getattr(result, "tokens", None),
        "flops": getattr(result, "flops", None),
        "losses": {} if diverged else losses,
        "spikes": getattr(result, "spikes", None),
        "training": _curve(training, ("loss",)),
        "telemetry": _curve(
            telemetry,
            (
                "spectral_radius",
                "state_norm",
                "residual",
                "transition_norm",
                "input_norm",
                "readout_norm",
                "readout_expansion",
            ),
        ),
    }


def _curve(lines: Sequence[Row], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Columns over training: means of as many lines as give `CURVE_POINTS` points."""
    if not lines:
        return {}
    groups = np.array_split(np.arange(len(lines)), min(CURVE_POINTS, len(lines)))
    columns: dict[str, list[float | None]] = {
        "step": [lines[group[-1]]["step"] for group in groups]
    }
    for name in names:
        columns[name] = [_mean([lines[index].get(name) for index in group]) for group in groups]
    return columns


def _mean(values: Sequence[float | None]) -> float | None:
    """To four digits; None if one is not finite."""
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    return float(f"{np.mean(np.array(values, dtype=float)):.4g}")


def _can_evaluate(run: Run, store: Store) -> bool:
    """Whether there are task files, beside the texts, and a checkpoint."""
    return store.texts is not None and bool(list_steps(store.folder(run)))


def _evaluate(
    run: Run, store: Store, suites: Sequence[str], loops: int, limit: int | None = None
) -> tuple[Mapping[str, Any], str]:
    """Results of suites by name, and the key of the one depth that was evaluated."""
    assert store.texts is not None
    depth = loops if run.recipe.model.architecture == "looped" else 1
    data = store.texts.parent
    result = evaluate(store.folder(run), suites, loops=depth, task_data=data, limit=limit)
    return result.suites, str(depth)


def wikitext_record(run: Run, store: Store, loops: int) -> Row:
    """Perplexity per word on the first articles of WikiText-2, where that is among the texts."""
    if not _can_evaluate(run, store):
        return {"wikitext": None}
    suites, depth = _evaluate(run, store, ("wikitext",), loops, limit=ARTICLES)
    at = suites["wikitext"]["by_loops"][depth]
    return {"wikitext": at and at["word_perplexity"]}


def core_record(run: Run, store: Store, loops: int) -> Row:
    """CORE and CORE-Extended in %; None where task files are missing or prompts do not fit."""
    names = ("core", "core-extended")
    if run.recipe.model.context_length < FEW_SHOT_CONTEXT or not _can_evaluate(run, store):
        return dict.fromkeys(names)
    suites, depth = _evaluate(run, store, names, loops)
    scores = {name: suites[name]["by_loops"][depth] for name in names}
    return {name: at and 100 * at["score"] for name, at in scores.items()}


def zero_shot_record(run: Run, store: Store, loops: int) -> Row:
    """Mean accuracy in % over the zero-shot tasks, without one that a training text gives away."""
    if not _can_evaluate(run, store):
        return {"zero_shot": None}
    few = FEW_ITEMS if run.recipe.model.context_length < FEW_SHOT_CONTEXT else None
    suites, depth = _evaluate(run, store, ("zero-shot",), loops, limit=few)
    accuracies = [
        at["accuracy"]
        for name, task in suites["zero-shot"]["tasks"].items()
        if task and OVERLAPPING.get(name) != run.source and (at := task["by_loops"][depth])
    ]
    return {"zero_shot": 100 * float(np.mean(accuracies)) if accuracies else None}


def format_losses(values: Mapping[int, float]) -> str:
    """Mean and interval over seeds, for a table."""
    return describe(values.values()).partition(" (")[0]


def format_scores(rows: Sequence[Row], name: str) -> str:
    """What runs have measured under a name, where they have: mean and interval, for a table."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return describe(values, 1).partition(" (")[0]
