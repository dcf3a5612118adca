"""The suites of `parcae eval`, by name. This is the only place that lists them.

A suite opens its data into jobs, which are scored one by one, and makes its entry of the result
from their records. A task whose data is missing stays in the result as null, and every mean says
over how many tasks it was taken. Importing this module is cheap; what opens a suite is imported on
use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from parcae.config import ConfigError
from parcae.evaluation.tasks import (
    Baselines,
    Task,
    TaskFiles,
    core,
    core_extended,
    files_of_tasks,
    tasks_named,
)
from parcae.files import FileError
from parcae.recipe import suggest

if TYPE_CHECKING:
    from parcae.data.sources import ReadOptions
    from parcae.evaluation.jobs import Job
    from parcae.evaluation.results import Samples
    from parcae.evaluation.scorer import Scorer


SEEDS = (1234, 2345, 3456)
"""Default seeds of the few-shot examples."""
CPU_BATCH_TOKENS, DEVICE_BATCH_TOKENS = 1024, 32_768
"""Tokens scored at a time; on a CPU the activations of a layer stay in a core's cache."""


class Suite(Protocol):
    @property
    def jobs(self) -> Sequence[Job]: ...

    def result(self, samples: Samples, loops: Sequence[int]) -> dict[str, Any]:
        """The entry of the suite in the result, once all jobs are scored."""
        ...


@dataclass(frozen=True)
class SuiteOptions:
    """What the suites of an evaluation are measured on."""

    data: Path | None = None
    """Folder of the task files."""
    val_data: Path | str | None = None
    """File of held-out texts, for `val`; None for the rows of a run."""
    read_options: ReadOptions | None = None
    """How the file of texts is cut into documents."""
    run: Path | None = None
    """The run that the model belongs to."""
    tasks: tuple[Path, ...] = ()
    """Files of questions, for `own`."""
    seeds: tuple[int, ...] = SEEDS
    limit: int | None = None
    """Items of each task at most."""
    baselines: Baselines = "nanochat"

    @property
    def folder(self) -> Path:
        assert self.data is not None
        return self.data


@dataclass(frozen=True)
class SuiteEntry:
    title: str
    open: Callable[[SuiteOptions, Scorer], Suite]
    needs_data: bool = True
    """Whether it reads the folder of task files."""
    metric: str = "score"
    """What scores.png shows."""
    unit: str = ""
    files: Callable[[], tuple[Iterable[Task], Iterable[str]]] | None = None
    """Tasks whose files `parcae data download` fetches, and names of those it cannot fetch."""


def _open_val(options: SuiteOptions, scorer: Scorer) -> Suite:
    from parcae.evaluation.loss import open_held_out_rows
    from parcae.evaluation.perplexity import TextSuite, open_texts

    if options.val_data is not None:
        return open_texts(options.val_data, options.limit, scorer, options.read_options)
    return TextSuite(open_held_out_rows(options.run, options.limit, scorer))


def _open_wikitext(options: SuiteOptions, scorer: Scorer) -> Suite:
    from parcae.evaluation.perplexity import open_wikitext

    return open_wikitext(options.folder, options.limit, scorer)


def _open_lambada(options: SuiteOptions, scorer: Scorer) -> Suite:
    from parcae.evaluation.perplexity import open_lambada

    return open_lambada(options.folder, options.limit)


def _open_zero_shot(options: SuiteOptions, scorer: Scorer) -> Suite:
    from parcae.evaluation.zero_shot import open_zero_shot_suite

    return open_zero_shot_suite(options.folder, options.limit)


def _open_own(options: SuiteOptions, scorer: Scorer) -> Suite:
    from parcae.evaluation.zero_shot import open_own_tasks

    return open_own_tasks(options.tasks, options.limit)


def _open_tasks(tasks: Callable[[], Sequence[Task]]) -> Callable[[SuiteOptions, Scorer], Suite]:
    def open_suite(options: SuiteOptions, scorer: Scorer) -> Suite:
        from parcae.evaluation.core_suite import open_in_context_suite

        return open_in_context_suite(
            tasks(),
            options.folder,
            scorer,
            seeds=options.seeds,
            limit=options.limit,
            baselines=options.baselines,
        )

    return open_suite


def _zero_shot_files() -> tuple[list[Task], list[str]]:
    from parcae.evaluation.zero_shot import TASKS

    known = {task.file: task for task in core_extended()}
    chosen = {
        task.name: next((known[c.file] for c in task.candidates if c.file in known), None)
        for task in TASKS
    }
    available = [task for task in chosen.values() if task is not None]
    return available, [name for name, task in chosen.items() if task is None]


SUITES: dict[str, SuiteEntry] = {
    "val": SuiteEntry(
        "Held-out text", _open_val, needs_data=False, metric="perplexity", unit="perplexity"
    ),
    "wikitext": SuiteEntry(
        "WikiText", _open_wikitext, metric="word_perplexity", unit="word perplexity"
    ),
    "lambada": SuiteEntry(
        "LAMBADA",
        _open_lambada,
        metric="perplexity",
        unit="perplexity",
        files=lambda: (tasks_named(["lambada_openai"]), ()),
    ),
    "core": SuiteEntry(
        "CORE", _open_tasks(core), unit="centred accuracy in %", files=lambda: (core(), ())
    ),
    "core-extended": SuiteEntry(
        "CORE-Extended",
        _open_tasks(core_extended),
        unit="centred accuracy in %",
        files=lambda: (core_extended(), ()),
    ),
    "zero-shot": SuiteEntry(
        "Zero-shot", _open_zero_shot, unit="accuracy in %", files=_zero_shot_files
    ),
    "own": SuiteEntry("Own tasks", _open_own, needs_data=False, unit="accuracy in %"),
}

DOWNLOADABLE = tuple(name for name, entry in SUITES.items() if entry.files is not None)


def check_suites(names: Sequence[str]) -> tuple[str, ...]:
    """The names without repetitions; an unknown name is an error."""
    for name in names:
        if name not in SUITES:
            raise ConfigError(f"suite: {name!r} is not known. {suggest(name, tuple(SUITES))}")
    if not names:
        raise ConfigError(f"suite: none is given. Known: {', '.join(SUITES)}.")
    return tuple(dict.fromkeys(names))


def job_name(suite: str, task: str) -> str:
    """What the samples call a task of a suite; a task of CORE is the same in each suite."""
    return f"{suite}/{task}" if suite in ("zero-shot", "own") else task


def check_data(names: Sequence[str], folder: Path | None, tasks: Sequence[Path] = ()) -> None:
    """Refuse suites that read task files where these or their folder are missing."""
    if "own" in names and not tasks:
        raise ConfigError("suite: own needs files of questions. Give them with `tasks`.")
    for path in tasks:
        if not path.is_file():
            raise FileError(f"{path}: no such file. Give a file of questions, one in each line.")
    reading = [name for name in names if SUITES[name].needs_data]
    if not reading:
        return
    if folder is None:
        raise ConfigError(
            f"task_data: no folder of task files for {', '.join(reading)}. Give it with "
            "`task_data`; `parcae data download core --out FOLDER` creates one."
        )
    if not folder.is_dir():
        raise FileError(
            f"{folder}: no such folder. Give the folder of task files with `task_data`."
        )


def files_of(suite: str) -> TaskFiles:
    """The task files of a suite, for `download_tasks`."""
    entry = SUITES.get(suite)
    if entry is None or entry.files is None:
        raise ConfigError(f"suite: {suite!r} has no files. {suggest(suite, DOWNLOADABLE)}")
    return files_of_tasks(*entry.files())
