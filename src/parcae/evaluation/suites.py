"""What `--suite` names: the jobs each suite needs, and the numbers it comes to.

    core, core-extended     centred accuracy over the tasks of the paper's table, several seeds
    zero-shot               accuracy on the six tasks of the comparison with RDMs
    lambada                 accuracy and perplexity of the last word
    wikitext                perplexity of whole articles, by word and by byte

A task whose data is not there stays in the result as null, and a mean says over how many it is. A
depth at which the model has no predictions is null, too, and so is every mean over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any, Protocol

from parcae.config import ConfigError
from parcae.evaluation.in_context import InContext, Questions
from parcae.evaluation.job import DataFile, Job, Record, mean, summary
from parcae.evaluation.perplexity import Passages, RunningText
from parcae.evaluation.prompts import SEEDS
from parcae.evaluation.samples import Samples
from parcae.evaluation.scoring import Scorer
from parcae.evaluation.tasks import Baselines, Task, core, core_extended, find, locate
from parcae.evaluation.texts import as_written, read_passages, read_wikitext
from parcae.evaluation.zero_shot import TASKS as ZERO_SHOT_TASKS
from parcae.evaluation.zero_shot import ZeroShot, open_task
from parcae.files import FileError

LAMBADA_FILE = "language_understanding/lambada_openai.jsonl"
WIKITEXT_FILES = tuple(
    f"{folder}wiki.test.raw" for folder in ("corpora/wikitext2_raw/", "wikitext-2-raw/", "")
)


@dataclass(frozen=True)
class Choices:
    """How suites are to be measured."""

    folder: Path
    """Of evaluation data."""
    seeds: tuple[int, ...] = SEEDS
    limit: int | None = None
    """Items of each task, or articles, at most."""
    baselines: Baselines = "nanochat"


class Suite(Protocol):
    @property
    def jobs(self) -> Sequence[Job]: ...

    def result(self, samples: Samples, depths: Sequence[int]) -> dict[str, Any]: ...


class ContextSuite:
    """CORE, CORE-Extended, or any tasks of them."""

    def __init__(self, tasks: Sequence[Task], choices: Choices, scorer: Scorer) -> None:
        self.choices = choices
        self.jobs: list[InContext] = []
        self.by_task: list[tuple[Task, list[InContext] | None]] = []
        for task in tasks:
            found = _questions(task, choices.folder)
            seeds = choices.seeds if task.shots or scorer.draws_state else choices.seeds[:1]
            made = [InContext(found, seed, choices.limit) for seed in seeds] if found else None
            self.by_task.append((task, made))
            self.jobs += made or []

    def result(self, samples: Samples, depths: Sequence[int]) -> dict[str, Any]:
        held = {
            task.name: None if jobs is None else _Task(task, jobs, samples, depths, self.choices)
            for task, jobs in self.by_task
        }
        here = [task for task in held.values() if task is not None]
        return {
            "baselines": self.choices.baselines,
            "seeds": list(self.choices.seeds),
            **_extent(held),
            "by_loops": {str(d): self._score(here, place) for place, d in enumerate(depths)},
            "tasks": {name: None if one is None else one.result() for name, one in held.items()},
        }

    def _score(self, tasks: Sequence[_Task], place: int) -> dict[str, Any] | None:
        """The mean over tasks, of each seed and of all; None where a task has none."""
        rows = [row for task in tasks if (row := task.centred(place)) is not None]
        if not rows or len(rows) < len(tasks):
            return None
        scores = [mean(column) for column in zip(*rows, strict=True)]
        return {
            "score": mean(scores),
            "deviation": _deviation(scores),
            "by_seed": dict(zip(map(str, self.choices.seeds), scores, strict=True)),
        }


class _Task:
    """What a task comes to at every seed and depth. Where nothing depends on the seed there is one
    job for all seeds."""

    def __init__(
        self,
        task: Task,
        jobs: Sequence[InContext],
        samples: Samples,
        depths: Sequence[int],
        choices: Choices,
    ) -> None:
        self.task, self.jobs, self.depths, self.choices = task, jobs, depths, choices
        found = [self._read(job, samples) for job in jobs]
        by_seed = [found[min(place, len(found) - 1)] for place in range(len(choices.seeds))]
        self.at = [_at_every_seed(column) for column in zip(*by_seed, strict=True)]
        """Summaries [depth][seed]; None at a depth that is lost."""

    def _read(self, job: InContext, samples: Samples) -> list[dict[str, Any] | None]:
        records = samples.of(job)
        self.extent = _measured_on(job, records)
        return [summary(job, records, place) for place in range(len(self.depths))]

    def result(self) -> dict[str, Any]:
        questions = self.jobs[0].questions
        return {
            "title": self.task.title,
            "type": self.task.kind,
            "shots": self.task.shots,
            "baseline": self.task.baselines[self.choices.baselines],
            "uniform_chance": 100 * questions.chance,
            "items": len(questions),
            **self.extent,
            "by_loops": {str(depth): self._at(place) for place, depth in enumerate(self.depths)},
        }

    def centred(self, place: int) -> list[float] | None:
        """At every seed."""
        found = self.at[place]
        if found is None:
            return None
        return [self.task.centred(one["accuracy"], self.choices.baselines) for one in found]

    def _at(self, place: int) -> dict[str, Any] | None:
        found, centred = self.at[place], self.centred(place)
        if found is None or centred is None:
            return None
        accuracies = [one["accuracy"] for one in found]
        return {
            "accuracy": mean(accuracies),
            "deviation": _deviation(accuracies),
            "standard_error": found[0]["standard_error"],
            "centred": mean(centred),
        }


def _at_every_seed(found: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]] | None:
    held = [one for one in found if one is not None]
    return held if len(held) == len(found) else None


class ZeroShotSuite:
    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.by_task: dict[str, ZeroShot | None] = {
            task.name: open_task(task, choices.folder, choices.limit) for task in ZERO_SHOT_TASKS
        }
        self.jobs = [job for job in self.by_task.values() if job is not None]

    def result(self, samples: Samples, depths: Sequence[int]) -> dict[str, Any]:
        tasks = {
            name: None if job is None else _plain_result(job, samples, depths)
            for name, job in self.by_task.items()
        }
        here = [task for task in tasks.values() if task is not None]
        return {
            **_extent(tasks),
            "by_loops": {depth: self._score(here, depth) for depth in map(str, depths)},
            "tasks": tasks,
        }

    def _score(self, tasks: Sequence[dict[str, Any]], depth: str) -> dict[str, Any] | None:
        rows = [at for task in tasks if (at := task["by_loops"][depth]) is not None]
        if not rows or len(rows) < len(tasks):
            return None
        return {"score": mean([at["accuracy"] for at in rows])}


class TextSuite:
    """LAMBADA or WikiText: one job, or none where there is no data."""

    def __init__(self, job: Job | None) -> None:
        self.job = job
        self.jobs = [] if job is None else [job]

    def result(self, samples: Samples, depths: Sequence[int]) -> dict[str, Any]:
        if self.job is None:
            return {"by_loops": {str(depth): None for depth in depths}}
        return _plain_result(self.job, samples, depths)


def open_suite(name: str, choices: Choices, scorer: Scorer) -> Suite:
    made: dict[str, Callable[[], Suite]] = {
        "core": lambda: ContextSuite(core(), choices, scorer),
        "core-extended": lambda: ContextSuite(core_extended(), choices, scorer),
        "zero-shot": lambda: ZeroShotSuite(choices),
        "lambada": lambda: TextSuite(_lambada(choices)),
        "wikitext": lambda: TextSuite(_wikitext(choices, scorer)),
    }
    if name not in made:
        raise ConfigError(f"suite: {name!r} is not known. Use {', '.join(made)}.")
    if not choices.folder.is_dir():
        raise FileError(
            f"{choices.folder}: no such folder. Name the folder of evaluation tasks by --eval-data."
        )
    return made[name]()


def _questions(task: Task, folder: Path) -> Questions | None:
    path = locate(task, folder)
    if path is None:
        return None
    stand_in = task.stand_in is not None and path.name.startswith(Path(task.stand_in).name)
    return Questions(task, DataFile(path, "evaluation", stand_in))


def _lambada(choices: Choices) -> Passages | None:
    path = find(choices.folder, LAMBADA_FILE)
    if path is None:
        return None
    return Passages("lambada", read_passages(path)[: choices.limit], DataFile(path, "test"))


def _wikitext(choices: Choices, scorer: Scorer) -> RunningText | None:
    paths = (find(choices.folder, name) for name in WIKITEXT_FILES)
    path = next((path for path in paths if path is not None), None)
    if path is None:
        return None
    counted = read_wikitext(path)[: choices.limit]
    read = [as_written(article) for article in counted]
    return RunningText("wikitext", read, counted, DataFile(path, "test"), scorer)


def _plain_result(job: Job, samples: Samples, depths: Sequence[int]) -> dict[str, Any]:
    records = samples.of(job)
    return {
        **_measured_on(job, records),
        "by_loops": {
            str(depth): summary(job, records, place) for place, depth in enumerate(depths)
        },
    }


def _measured_on(job: Job, records: Sequence[Record]) -> dict[str, Any]:
    """The file, how much of it was scored, how often a prompt was too long, and how often the
    tokenizer made one token of a question's end and its answer's beginning, if ever."""
    extent: dict[str, Any] = {"scored": len(job)}
    if "cut" in records[0]:
        extent["share_cut"] = mean([float(record["cut"]) for record in records])
    if any("unaligned" in record for record in records):
        extent["share_unaligned"] = mean([float("unaligned" in record) for record in records])
    return {**job.source.describe(), **extent}


def _extent(tasks: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name, found in tasks.items() if found is None]
    return {
        "tasks_scored": len(tasks) - len(missing),
        "tasks_wanted": len(tasks),
        "missing": missing,
    }


def _deviation(numbers: Sequence[float]) -> float | None:
    return stdev(numbers) if len(numbers) > 1 else None
