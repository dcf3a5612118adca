"""`parcae.evaluate`: measure a model on one or several suites, at any number of loops.

result = parcae.evaluate("runs/a", suites=("val",), loops=(1, 4, 8))
result.suites["val"]["by_loops"]["8"]["loss"]
pandas.DataFrame(result.table())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcae.config import ConfigError, require
from parcae.data.sources import ReadOptions
from parcae.evaluation.jobs import Job
from parcae.evaluation.results import PICTURE, RESULT, EvaluationResult, Samples
from parcae.evaluation.scorer import Precision, Scorer, State, open_scorer
from parcae.evaluation.suites import SEEDS, SUITES, Suite, SuiteOptions, check_data, check_suites
from parcae.evaluation.tables import picture, published_scores
from parcae.evaluation.tasks import BASELINES, Baselines
from parcae.files import FileError, check_links, lock_folder, read_json, write_json, writing
from parcae.infer.sampling import NonFiniteLogits
from parcae.model.base import LanguageModel
from parcae.runs import run_of
from parcae.runs.layout import CHECKPOINTS_FOLDER, EVALUATION_FOLDER
from parcae.schema import require_range

if TYPE_CHECKING:
    import torch

    from parcae.data.tokenizer import Tokenizer

FORMAT = 4
"""Version of samples.jsonl; raise it when its contents change."""


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is; a callback gets one after every batch."""

    checkpoint: str
    looped: bool
    loops: tuple[int, ...]
    task: str = ""
    """The job being scored, with its seed; empty before the first one."""
    items_done: int = 0
    items: int = 0
    """Items of this job."""
    tokens_done: int = 0
    tokens: int = 0
    """Tokens of all jobs, estimated."""
    unit: tuple[str, str] = ("item", "items")
    """What an item is: one, several."""


Report = Callable[[Progress], None]


def evaluate(
    model: str | Path | LanguageModel,
    suites: str | Sequence[str] | None = None,
    *,
    tasks: str | Path | Sequence[str | Path] = (),
    loops: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    task_data: str | Path | None = None,
    val_data: str | Path | None = None,
    separator: str | None = None,
    document_start: str | None = None,
    text_field: str | None = None,
    limit: int | None = None,
    seeds: Sequence[int] | None = None,
    baselines: Baselines = "nanochat",
    state: State = "zero",
    tokenizer: str | Path | Tokenizer | None = None,
    best: bool = False,
    batch_tokens: int | None = None,
    context_length: int | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    precision: Precision = "float32",
    overwrite: bool = False,
    follow_links: bool = False,
    progress: Report | None = None,
) -> EvaluationResult:
    """Measure a model on suites of tasks and return the result.

    Args:
        model: The folder of a parcae model, a run or a checkpoint; the folder or the hub name of a
            causal transformers model; or a parcae model in memory, which needs `tokenizer`.
        suites: Names from `parcae.evaluation.suites.SUITES`: val, wikitext, lambada, core,
            core-extended, zero-shot. Default: val, or none if there are `tasks`.
        tasks: Files of own multiple-choice questions, the suite `own`: JSON lines with question,
            choices and answer.
        loops: Numbers of loops to score at; all are read from one pass. Default: the mean number of
            loops in training.
        out: Folder for result.json, samples.jsonl and scores.png. An interrupted evaluation resumes
            from it. Numbers of loops at which all items were scored earlier are kept in the result
            and not computed again. Default: nothing is written.
        task_data: Folder of the task files. All suites but val need it.
        val_data: File of held-out texts for val. Default: the rows that the run holds out.
        separator: Line that separates the documents of `val_data`, if it is a text file, such as
            `<|endoftext|>`. Default: the file is one document.
        document_start: Regular expression of the lines at which its documents start, instead.
        text_field: JSON key or Parquet column that contains the text. Default: text.
        limit: Score at most this many items of each task (articles of wikitext, rows or texts of
            val). Default: all; of a run's rows, `run.validation_rows`.
        seeds: Seeds of the few-shot examples. Default: 1234, 2345, 3456.
        baselines: Table of the accuracies of guessing, for centred accuracy: nanochat or dclm.
        state: Initial state of the loop: zero, or like-init, which is drawn by the seed.
        tokenizer: Path of a tokenizer. Default: the one in the folder of the model or run.
        best: Evaluate the checkpoint of a run with the lowest validation loss, not the newest.
        batch_tokens: Tokens scored at a time. Default: chosen for the device.
        context_length: Tokens the model reads at a time. Default: its context length.
        device: Where the model runs. Default: CUDA where it is available, else the CPU; a model in
            memory stays where it is.
        trust_remote_code: Run the Python code that comes with a transformers model. Default: such a
            model is refused.
        precision: float32, or bfloat16 for products with weights: faster on CPUs with instructions
            for it, but scores change in the third or fourth digit.
        overwrite: Drop earlier results in `out`.
        follow_links: Write through symbolic links that lead out of `out`, or of the run it is in.
            Default: such links are refused.
        progress: Called with a `Progress` before the first and after every batch.

    A task whose data is missing is None in the result; metrics at a number of loops where the model
    diverges are None.
    """
    start = time.monotonic()
    own = tuple(map(Path, [tasks] if isinstance(tasks, str | Path) else tasks))
    suites = (() if own else ("val",)) if suites is None else suites
    suites = [suites] if isinstance(suites, str) else suites
    names = check_suites([*suites, *(["own"] if own else [])])
    if limit is not None:
        require_range("limit", limit, at_least=1)
    require(
        baselines in BASELINES, "baselines", f"{baselines!r}", f"Known: {', '.join(BASELINES)}."
    )
    read_settings = {
        "separator": separator,
        "document_start": document_start,
        "text_field": text_field,
    }
    for name, value in read_settings.items():
        require(
            value is None or val_data is not None,
            name,
            f"{value!r}, but there is no file of texts",
            "Give it with `val_data`; the rows of a run are separated already.",
        )
    options = SuiteOptions(
        data=None if task_data is None else Path(task_data),
        val_data=val_data,
        read_options=ReadOptions(
            separator=separator,
            document_start=document_start,
            text_field="text" if text_field is None else text_field,
        ),
        run=None if isinstance(model, LanguageModel) else run_of(model),
        seeds=tuple(dict.fromkeys(seeds)) if seeds else SEEDS,
        limit=limit,
        baselines=baselines,
        tasks=own,
    )
    check_data(names, options.data, own)
    folder = None if out is None else Path(out)
    if folder is not None:
        in_model = folder.name == EVALUATION_FOLDER
        written = [folder.name] if in_model else None
        check_links(folder.parent if in_model else folder, written, follow_links)
    scorer = open_scorer(
        model,
        [loops] if isinstance(loops, int) else loops,
        state=state,
        tokenizer=tokenizer,
        best=best,
        batch_tokens=batch_tokens,
        context=context_length,
        device=device,
        trust_remote_code=trust_remote_code,
        precision=precision,
    )
    report = progress or (lambda _: None)
    report(Progress(scorer.name, scorer.is_looped, scorer.loops))
    with nullcontext() if folder is None else lock_folder(folder):
        return _evaluate(
            scorer,
            names,
            options,
            state=state,
            folder=folder,
            overwrite=overwrite and folder is not None,
            report=report,
            start=start,
        )


def default_folder(model: str | Path) -> Path:
    """Where `parcae eval` writes: below the model, or below out/ for a model of the hub."""
    path = Path(model)
    if not path.is_dir():
        return Path("out", EVALUATION_FOLDER, path.name)
    return (path.parent if path.name == CHECKPOINTS_FOLDER else path) / EVALUATION_FOLDER


def _evaluate(
    scorer: Scorer,
    names: Sequence[str],
    options: SuiteOptions,
    *,
    state: State,
    folder: Path | None,
    overwrite: bool,
    report: Report,
    start: float,
) -> EvaluationResult:
    # Opened before earlier results are dropped: their data may be missing or damaged.
    suites: dict[str, Suite] = {name: SUITES[name].open(options, scorer) for name in names}
    if overwrite and folder is not None:
        _drop_results(folder)
    settings = {
        "format": FORMAT,
        "model": scorer.identity,
        "state": state,
        "context length": scorer.context_length,
        "loops": list(scorer.loops),
    }
    samples = Samples(folder, settings, overwrite)
    jobs = [job for suite in suites.values() for job in suite.jobs]
    try:
        _score(jobs, scorer, samples, report)
    except NonFiniteLogits as error:
        raise ConfigError(f"{scorer.name}: {error}") from None
    loops = tuple(sorted({*scorer.loops, *samples.common_loops(jobs)}))
    earlier = _other_suites(folder, names)
    result = EvaluationResult(
        checkpoint=scorer.name,
        looped=scorer.is_looped,
        loops=tuple(sorted({*loops, *(int(t) for s in earlier.values() for t in s["by_loops"])})),
        state=state,
        context_length=scorer.context_length,
        task_data=None if options.data is None else str(options.data),
        suites=earlier
        | {
            name: {**suite.result(samples, loops), "limit": options.limit}
            for name, suite in suites.items()
        },
        seconds=round(time.monotonic() - start, 1),
        mean_loops=scorer.mean_loops,
        folder=folder,
        records=samples.all() if folder is None else (),
    )
    if folder is not None:
        write_json(folder / RESULT, result.to_json())
        published = published_scores(options.data, options.baselines)
        if picture(result, folder / PICTURE, published) is None:
            with writing(folder / PICTURE):  # one of an earlier evaluation
                (folder / PICTURE).unlink(missing_ok=True)
    return result


def _score(jobs: Sequence[Job], scorer: Scorer, samples: Samples, report: Report) -> None:
    """Score the items at the numbers of loops where they have no record yet."""
    parts = [
        (job, scorer.at(loops), items)
        for job in jobs
        for loops, items in samples.missing(job, scorer.loops).items()
    ]
    if not parts:  # a killed evaluation may have scored all items, and not sorted them
        samples.sort()
        return
    costs = [job.cost(scorer) for job, *_ in parts]
    tokens = round(sum(cost * len(job) for cost, (job, *_) in zip(costs, parts, strict=True)))
    tokens_done = 0.0
    for (job, scorer_at_loops, items), cost in zip(parts, costs, strict=True):
        label = job.name if job.seed is None else f"{job.name}, seed {job.seed}"
        items_done = 0
        for count in score_job(job, scorer_at_loops, samples, items):
            items_done += count
            tokens_done += count * cost
            report(
                Progress(
                    scorer.name,
                    scorer.is_looped,
                    scorer_at_loops.loops,
                    label,
                    items_done,
                    len(job),
                    round(tokens_done),
                    tokens,
                    job.unit,
                )
            )
    samples.sort()


def score_job(job: Job, scorer: Scorer, samples: Samples, items: Collection[int]) -> Iterator[int]:
    """Score some items of a job; yield the number of items of each batch, scored or not."""
    yield 0  # the label is shown before the first batch
    for count, records in job.score(scorer, lambda index: index not in items):
        if new := {index: record for index, record in records.items() if index in items}:
            samples.add(job, new, scorer.loops)
        yield count


def _other_suites(folder: Path | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The suites of an earlier result in the folder that are not measured now."""
    if folder is None or not (folder / RESULT).exists():
        return {}
    try:
        result = read_json(folder / RESULT)
        return {
            name: {"limit": result.get("limit"), **suite}  # earlier versions had one for all suites
            for name, suite in result["suites"].items()
            if name in SUITES and name not in names and _is_complete(suite["by_loops"])
        }
    except (FileError, LookupError, TypeError, ValueError, AttributeError):  # damaged
        return {}


def _is_complete(by_loops: Mapping[str, Any]) -> bool:
    measured = (metrics is None or isinstance(metrics, dict) for metrics in by_loops.values())
    return all(measured) and all(int(loops) > 0 for loops in by_loops)


def _drop_results(folder: Path) -> None:
    """An earlier result must not be read together with the samples of another evaluation."""
    for name in (RESULT, PICTURE):
        with writing(folder / name):
            (folder / name).unlink(missing_ok=True)
