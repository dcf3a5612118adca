"""`parcae eval`: a model measured on the paper's tasks, at any number of loops."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.evaluation.job import Job
    from parcae.evaluation.samples import Samples
    from parcae.evaluation.scoring import Scorer
    from parcae.evaluation.suites import Suite

SUITES = ("val", "wikitext", "lambada", "core", "core-extended", "zero-shot")


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="measure a model: held-out loss, WikiText, LAMBADA, CORE, zero-shot tasks",
        epilog="Results go to result.json, samples.jsonl (item by item) and scores.png. A killed "
        "evaluation goes on where it was when it is started again.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder of a model, of a run, or any causal model of Hugging Face's by folder or name",
    )
    parser.add_argument(
        "--suite",
        nargs="+",
        default=["val"],
        metavar="NAME",
        help=f"one or several of {', '.join(SUITES)} (default: val)",
    )
    parser.add_argument(
        "--loops", metavar="T,T,...", help="loops to score at (default: the mean in training)"
    )
    parser.add_argument(
        "--eval-data", type=Path, metavar="FOLDER", help="of the tasks' files; see the docs"
    )
    parser.add_argument(
        "--val-data", metavar="PATH", help="held-out texts for val, where there is no run"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="score at most N items of each task")
    parser.add_argument(
        "--seeds", metavar="N,N,...", help="of the examples shown (default: 1234,2345,3456)"
    )
    parser.add_argument(
        "--baselines",
        choices=("nanochat", "dclm"),
        default="nanochat",
        help="table of what guessing scores (default: nanochat, as the reference release)",
    )
    parser.add_argument(
        "--state",
        choices=("zero", "like-init"),
        default="zero",
        help="what loops start from; like-init is drawn by the seed (default: zero)",
    )
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="tokens scored at a time")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens read at a time (default: the model's own)"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs (default: cpu)")
    parser.add_argument("--tokenizer", metavar="FILE", help="if not beside the model")
    parser.add_argument("--best", action="store_true", help="a run's best checkpoint, not its last")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: CHECKPOINT/evaluation")
    parser.add_argument("--again", action="store_true", help="drop earlier results in the folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae.config import require
    from parcae.files import exclusive, to_json, write_json

    names = _suites(arguments.suite)
    limit = arguments.limit
    require(limit is None or limit >= 1, "limit", f"{limit} is not positive", "Use at least 1.")
    loops, seeds = _numbers(arguments.loops, "loops"), _numbers(arguments.seeds, "seeds")
    _check_data(arguments, [name for name in names if name != "val"])

    from parcae import console
    from parcae.config import ConfigError
    from parcae.evaluation.opening import open_scorer
    from parcae.infer.sampling import BrokenLogits

    scorer = open_scorer(
        arguments.checkpoint,
        loops,
        state=arguments.state,
        tokenizer=arguments.tokenizer,
        best=arguments.best,
        batch_tokens=arguments.batch_tokens,
        context=arguments.context,
        device=arguments.device,
    )
    if loops is not None and not scorer.is_looped:
        console.err.print("The model has no loop: --loops changes nothing.", highlight=False)
    out = arguments.out or _default_folder(arguments.checkpoint)
    start = time.monotonic()
    at = f", T = {', '.join(map(str, scorer.depths))}" if scorer.is_looped else ""
    console.err.print(f"{scorer.name}{at}", markup=False, highlight=False, soft_wrap=True)
    with exclusive(out):
        if arguments.again:
            _drop_results(out)
        try:
            result = _evaluate(arguments, names, seeds, scorer, out)
        except BrokenLogits as error:
            raise ConfigError(f"{scorer.name}: {error}") from None
        result["seconds"] = round(time.monotonic() - start, 1)
        write_json(out / "result.json", result)
        picture = _show(result, arguments, out)
    if arguments.json:
        print(to_json(result), end="")
    else:
        made = [out / "result.json", out / "samples.jsonl", *([picture] if picture else [])]
        for path in made:
            if path.exists():
                console.out.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _evaluate(
    arguments: argparse.Namespace,
    names: list[str],
    seeds: list[int] | None,
    scorer: Scorer,
    out: Path,
) -> dict[str, Any]:
    from parcae.evaluation.prompts import SEEDS
    from parcae.evaluation.samples import Samples
    from parcae.evaluation.suites import Choices, open_suite

    choices = Choices(
        arguments.eval_data or Path(), tuple(seeds or SEEDS), arguments.limit, arguments.baselines
    )
    settings = {
        "format": 2,
        "model": scorer.identity,
        "state": arguments.state,
        "context length": scorer.context_length,
        "loops": list(scorer.depths),
    }
    samples = Samples(out, settings, arguments.again)
    others = [name for name in names if name != "val"]
    suites: dict[str, Suite] = {name: open_suite(name, choices, scorer) for name in others}
    held_out = None
    if "val" in names:
        from parcae.commands.held_out import measure_held_out, open_held_out

        if arguments.val_data is None:
            held_out = measure_held_out(arguments.checkpoint, arguments.limit, scorer)
        else:
            suites["val"] = open_held_out(arguments.val_data, arguments.limit, scorer)
    _score(suites, scorer, samples)
    found = {name: suite.result(samples, scorer.depths) for name, suite in suites.items()}
    if held_out is not None:
        found["val"] = held_out
    return {
        "checkpoint": scorer.name,
        "looped": scorer.is_looped,
        "loops": list(scorer.depths),
        "state": arguments.state,
        "context_length": scorer.context_length,
        "limit": arguments.limit,
        "eval_data": None if arguments.eval_data is None else str(arguments.eval_data),
        "suites": {name: found[name] for name in names},
    }


def _score(suites: dict[str, Suite], scorer: Scorer, samples: Samples) -> None:
    from parcae import console
    from parcae.evaluation.runner import estimated_cost, run, unfinished

    jobs = list(unfinished([job for suite in suites.values() for job in suite.jobs], samples))
    if not jobs:
        return
    with console.progress() as display:
        costs = {
            id(job): estimated_cost(job, scorer)
            for job in display.track(jobs, description="looking at the tasks")
        }
        whole = sum(costs[id(job)] * len(job) for job in jobs)
        all_bar = display.add_task("all tasks, in tokens", total=round(whole))
        bar = display.add_task("", total=1)

        def report(job: Job, items: int) -> None:
            display.advance(bar, items)
            display.advance(all_bar, round(items * costs[id(job)]))

        for job in jobs:
            label = job.name if job.seed is None else f"{job.name}, seed {job.seed}"
            display.reset(bar, description=label, total=len(job))
            run(job, scorer, samples, report)
            if not console.err.is_terminal:
                console.err.print(f"{label}: {len(job)} scored", markup=False, highlight=False)
    samples.tidy()


def _show(result: dict[str, Any], arguments: argparse.Namespace, out: Path) -> Path | None:
    from parcae import console
    from parcae.evaluation.published import published_scores
    from parcae.evaluation.tables import picture

    folder = arguments.eval_data
    published = {} if folder is None else published_scores(folder, arguments.baselines)
    if not arguments.json:
        for table in tables_that_fit(result, published):
            console.out.print(table)
        _notes(result)
    return picture(result, out / "scores.png", published)


def tables_that_fit(result: dict[str, Any], published: dict[str, Any]) -> list[Any]:
    """With as many of the published rows beside ours as the terminal has room for."""
    from parcae import console
    from parcae.evaluation.tables import tables

    unbounded = console.out.options.update(width=10_000)
    names = list(published)
    while True:
        made = list(tables(result, {name: published[name] for name in names}))
        wanted = max(console.out.measure(table, options=unbounded).maximum for table in made)
        if wanted <= console.out.width or not names:
            return made
        names.pop()


def _notes(result: dict[str, Any]) -> None:
    from parcae import console

    tasks = [
        task for suite in result["suites"].values() for task in suite.get("tasks", {}).values()
    ]
    notes = []
    if any(task and task.get("stand_in") for task in tasks):
        notes.append("* a part or a reconstruction of the task's data; result.json names the file.")
    if lost := [t for t in map(str, result["loops"]) if _is_lost(result, t)]:
        notes.append(f"Without predictions, so without a score: T={', '.join(lost)} (diverged).")
    if result["limit"] is not None:
        notes.append(f"Limited to {result['limit']} items of each task.")
    missing = sorted({one for s in result["suites"].values() for one in s.get("missing", ())})
    if missing:
        notes.append(f"Missing, and not part of any mean: {', '.join(missing)}.")
    for note in notes:
        console.out.print(note, markup=False, highlight=False, soft_wrap=True)


def _is_lost(result: dict[str, Any], loops: str) -> bool:
    """Whether something was measured, but not at this depth."""
    suites = result["suites"].values()
    tasks = [task for suite in suites for task in suite.get("tasks", {}).values() if task]
    measured = [*tasks, *(suite for suite in suites if "file" in suite)]
    return any(one["by_loops"][loops] is None for one in measured)


def _check_data(arguments: argparse.Namespace, names: list[str]) -> None:
    from parcae.config import require

    require(
        arguments.eval_data is not None or not names,
        "eval-data",
        f"the tasks' files are needed for {', '.join(names)}",
        "Name their folder by --eval-data; `parcae data download core --out FOLDER` fetches one.",
    )


def _suites(words: list[str]) -> list[str]:
    from parcae.config import ConfigError
    from parcae.recipe import suggest

    names = [name for word in words for name in word.split(",") if name]
    for name in names:
        if name not in SUITES:
            raise ConfigError(f"suite: {name!r} is not known. {suggest(name, SUITES)}")
    if not names:
        raise ConfigError(f"suite: none is named. Use {', '.join(SUITES)}.")
    return list(dict.fromkeys(names))


def _numbers(text: str | None, key: str) -> list[int] | None:
    from parcae.config import ConfigError

    if text is None:
        return None
    try:
        return list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise ConfigError(f"{key}: {text!r} is not a list of numbers such as 1,2,4,8.") from None


def _drop_results(out: Path) -> None:
    """What an earlier evaluation came to must not stand beside the samples of another."""
    from parcae.files import writing

    for name in ("result.json", "scores.png"):
        with writing(out / name):
            (out / name).unlink(missing_ok=True)


def _default_folder(checkpoint: str) -> Path:
    """Beside what was evaluated; models from the hub have no folder of ours."""
    from parcae.runs.layout import EVALUATION_FOLDER

    path = Path(checkpoint)
    return path / EVALUATION_FOLDER if path.is_dir() else Path("out/evaluation") / path.name
