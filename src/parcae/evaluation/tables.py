"""The result of an evaluation as tables for the terminal and as a figure of scores against loops.

Where the folder of task files has the published scores of other models, they are shown beside the
measured ones. They are files of this form:

    Task            , Accuracy  , Centered
    arc_easy        , 0.412458  , 0.216611
    CORE            ,           , 0.113891
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parcae import console, plotting
from parcae.evaluation.results import EvaluationResult
from parcae.evaluation.suites import SUITES
from parcae.evaluation.tasks import FOLDERS, SHORT_KINDS, Baselines, core
from parcae.files import read_text

Tree = Mapping[str, Any]
METRICS = {
    "loss": "loss",
    "perplexity": "perplexity",
    "word_perplexity": "word perplexity",
    "byte_perplexity": "byte perplexity",
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
}
IN_PERCENT = {"accuracy"}
PANELS_PER_ROW = 3

PUBLISHED_FOLDERS = tuple(f"{folder}/{below}" for folder in FOLDERS for below in ("", "meta"))
PUBLISHED_MODELS = {
    "openai-community-gpt2": "GPT-2",
    "openai-community-gpt2-medium": "GPT-2 medium",
    "openai-community-gpt2-large": "GPT-2 large",
    "openai-community-gpt2-xl": "GPT-2 XL",
}
Scores = dict[str, float]
"""Centred accuracy by task; CORE is their mean."""


def published_scores(folder: Path | None, baselines: Baselines = "nanochat") -> dict[str, Scores]:
    """Published scores by model, smallest model first; files that cannot be read are omitted.

    The scores in the files are centred by nanochat's baselines; for other baselines they are
    centred again, so that all scores of a table can be compared."""
    if folder is None:
        return {}
    published = {}
    for file, name in PUBLISHED_MODELS.items():
        paths = (folder / below.lstrip("/") / f"{file}.csv" for below in PUBLISHED_FOLDERS)
        if path := next((path for path in paths if path.is_file()), None):
            accuracies, scores = _read_column(path, 1), _read_column(path, 2)
            published[name] = scores if baselines == "nanochat" else _centre(accuracies, baselines)
    return published


def _centre(accuracies: Scores, baselines: Baselines) -> Scores:
    tasks = [task for task in core() if task.name in accuracies]
    scores = {task.name: task.centred(accuracies[task.name], baselines) for task in tasks}
    if len(tasks) == len(core()):
        scores["CORE"] = sum(scores.values()) / len(scores)
    return scores


def _read_column(path: Path, column: int) -> Scores:
    scores: Scores = {}
    for line in read_text(path, errors="replace").splitlines():
        cells = line.split(",")
        try:
            scores[cells[0].strip()] = float(cells[column])
        except (IndexError, ValueError):  # the header, or a line that is not a score
            continue
    return scores


def tables(
    result: EvaluationResult, published: Mapping[str, Scores], terminal: Console | None = None
) -> list[Table]:
    """One table per suite, with as many published models as the terminal has room for."""
    terminal = terminal or console.out
    unbounded = terminal.options.update(width=10_000)
    names = list(published)
    while True:
        made = list(_tables(result, {name: published[name] for name in names}))
        width = max(terminal.measure(table, options=unbounded).maximum for table in made)
        if width <= terminal.width or not names:
            return made
        names.pop()


def _tables(result: EvaluationResult, published: Mapping[str, Scores]) -> Iterator[Table]:
    for name, suite in result.suites.items():
        if "baselines" in suite:
            yield _in_context_table(name, suite, result, published)
        elif "tasks" in suite:
            yield _zero_shot_table(name, suite, result)
        else:
            yield _text_table(name, suite, result)


def _in_context_table(
    name: str, suite: Tree, result: EvaluationResult, published: Mapping[str, Scores]
) -> Table:
    """Centred accuracy in percent at each number of loops, and that of published models."""
    loops = list(suite["by_loops"])
    rows = []
    for task, of_task in suite["tasks"].items():
        others = [_percent(scores.get(task)) for scores in published.values()]
        if of_task is None:
            rows.append((task, "", "missing", *[""] * len(loops), *others))
            continue
        kind = f"{SHORT_KINDS[of_task['type']]}, {of_task['shots']}"
        by_loops = of_task["by_loops"]
        measured = [_percent(by_loops[t] and by_loops[t]["centred"]) for t in loops]
        label = f"{task} *" if of_task["stand_in"] else task
        rows.append((label, kind, _item_count(of_task), *measured, *others))
    totals = [_with_deviation(suite["by_loops"][t]) for t in loops]
    others = [
        _percent(scores.get("CORE")) if name == "core" else "" for scores in published.values()
    ]
    title = SUITES[name].title
    rows.append((f"{title}, {_task_count(suite)}", "", "", *totals, *others))
    columns = ("task", "type, shots", "items", *_headings(loops, result), *published)
    caption = f"{title}: centred accuracy in %, {suite['baselines']} baselines"
    return console.table(
        f"{caption}, {console.format_items(len(suite['seeds']), 'seed')}", columns, rows
    )


def _zero_shot_table(name: str, suite: Tree, result: EvaluationResult) -> Table:
    loops = list(suite["by_loops"])
    rows = []
    for task, of_task in suite["tasks"].items():
        if of_task is None:
            rows.append((task, "missing", "", *[""] * len(loops)))
            continue
        by_loops = of_task["by_loops"]
        accuracy = [_percent(by_loops[t] and by_loops[t]["accuracy"]) for t in loops]
        file = f"{Path(of_task['file']).name} ({of_task['split']})"
        rows.append((task, file, of_task["scored"], *accuracy))
    totals = [_percent(metrics and metrics["score"]) for metrics in suite["by_loops"].values()]
    rows.append((f"mean, {_task_count(suite)}", "", "", *totals))
    columns = ("task", "file (split)", "items", *_headings(loops, result))
    return console.table(f"{SUITES[name].title}: accuracy in %", columns, rows)


def _text_table(name: str, suite: Tree, result: EvaluationResult) -> Table:
    loops = list(suite["by_loops"])
    by_loops = suite["by_loops"]
    rows = [
        (title, *(_format_metric(metric, by_loops[t]) for t in loops))
        for metric, title in METRICS.items()
        if any(metrics and metric in metrics for metrics in by_loops.values())
    ]
    title = SUITES[name].title
    if "file" in suite:
        title += f": {Path(suite['file']).name}"
        if "documents" in suite:
            title += f", {console.format_items(suite['documents'], 'document')}"
    elif "rows" in suite:
        title += f": {console.format_items(suite['rows'], 'row')}"
    elif not rows:
        title += ": data missing"
    return console.table(title, ("metric", *_headings(loops, result)), rows)


def notes(result: EvaluationResult) -> list[str]:
    """What a reader of the tables has to know."""
    suites = result.suites.values()
    tasks = [task for suite in suites for task in suite.get("tasks", {}).values() if task]
    lines = []
    if any(task.get("stand_in") for task in tasks):
        lines.append("* part or reconstruction of the original data; result.json names the file.")
    measured = [*tasks, *(suite for suite in suites if "file" in suite or "rows" in suite)]
    diverged = [
        str(t)
        for t in result.loops
        if any(entry["by_loops"].get(str(t), {}) is None for entry in measured)
    ]
    if diverged:
        lines.append(f"No score, because the model diverged: T={', '.join(diverged)}.")
    for suite in suites:
        for name in {"separator", "document_start"} & suite.keys():
            if suite.get("documents") == 1 and suite["limit"] != 1:
                lines.append(f"{name}: {suite[name]!r} splits the file nowhere. Is it misspelt?")
    limited = {name: suite["limit"] for name, suite in result.suites.items() if suite["limit"]}
    for limit in sorted(set(limited.values())):
        names = [name for name in limited if limited[name] == limit]
        where = "" if len(names) == len(suites) else f" of {', '.join(names)}"
        lines.append(f"Limited to {console.format_items(limit, 'item')} of each task{where}.")
    if missing := sorted({name for suite in suites for name in suite.get("missing", ())}):
        lines.append(f"Missing tasks, not included in any mean: {', '.join(missing)}.")
    return lines


def picture(result: EvaluationResult, path: Path, published: Mapping[str, Scores]) -> Path | None:
    """A figure with one panel per suite; None without a loop or with a single number of loops."""
    panels = [panel for panel in _panels(result) if len(panel[2]) > 1]
    if not panels or not result.looped:
        return None
    columns = min(len(panels), PANELS_PER_ROW)
    rows = -(-len(panels) // columns)
    with plotting.figure(rows, columns, width=4.2, height=3.4) as (canvas, _):
        for unused in canvas.axes[len(panels) :]:
            unused.remove()
        for axis, (title, unit, points, deviations) in zip(canvas.axes, panels, strict=True):
            loops, values = list(points), list(points.values())
            axis.errorbar(loops, values, yerr=deviations, marker="o", capsize=3)
            axis.set(title=title, xlabel="loops T", ylabel=unit)
            axis.set_xscale("log", base=2)
            axis.set_xticks(loops, [str(t) for t in loops])
            axis.minorticks_off()
            if title.startswith("CORE,") and (gpt2 := published.get("GPT-2", {}).get("CORE")):
                colour = plotting.PALETTE[5]
                axis.axhline(100 * gpt2, color=colour, linestyle="--", linewidth=1)
                axis.annotate("GPT-2", (loops[0], 100 * gpt2), va="bottom", color=colour)
        return plotting.save(canvas, path)


Panel = tuple[str, str, dict[int, float], list[float] | None]
"""Title, unit, value by number of loops, deviations."""


def _panels(result: EvaluationResult) -> Iterator[Panel]:
    for name, suite in result.suites.items():
        entry = SUITES[name]
        by_loops = {int(t): metrics for t, metrics in suite["by_loops"].items() if metrics}
        if "tasks" in suite:
            points = {t: 100 * metrics["score"] for t, metrics in by_loops.items()}
            deviations = [100 * m["deviation"] for m in by_loops.values() if m.get("deviation")]
            complete = deviations if len(deviations) == len(points) else None
            title = f"{entry.title}, {_task_count(suite)}\n{_scored_items(suite)}"
            yield title, entry.unit, points, complete
            continue
        points = {t: m[entry.metric] for t, m in by_loops.items() if m.get(entry.metric)}
        yield f"{entry.title}\n{_scored_items(suite)}", entry.unit, points, None


def _scored_items(suite: Tree) -> str:
    """How many items a score was measured on: questions, windows of a text, or held-out rows."""
    if "rows" in suite:
        return console.format_items(suite["rows"], "row")
    tasks = suite["tasks"].values() if "tasks" in suite else [suite]
    return console.format_items(sum(task.get("scored", 0) for task in tasks if task), "item")


def _task_count(suite: Tree) -> str:
    return f"{suite['tasks_scored']} of {suite['tasks_wanted']} tasks"


def _headings(loops: Sequence[str], result: EvaluationResult) -> list[str]:
    return [f"T={t}" for t in loops] if result.looped else ["score"]


def _item_count(task: Tree) -> str:
    is_limited = task["scored"] < task["items"]
    return f"{task['scored']:,} of {task['items']:,}" if is_limited else f"{task['items']:,}"


def _with_deviation(metrics: Tree | None) -> str:
    if metrics is None:
        return "–"
    deviation = metrics["deviation"]
    return _percent(metrics["score"]) + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{round(100 * value, 1) + 0.0:.1f}"  # no -0.0


def _format_metric(metric: str, metrics: Tree | None) -> str:
    value = None if metrics is None else metrics.get(metric)
    if value is None:
        return "–"
    if metric in IN_PERCENT:
        return f"{100 * value:.1f} %"
    if value < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"
