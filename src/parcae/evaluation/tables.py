"""An evaluation's result as tables for the terminal and as a picture of scores against loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from parcae import console
from parcae import plotting as draw
from parcae.evaluation.published import Scores
from parcae.evaluation.tasks import SHORT_KINDS

Tree = Mapping[str, Any]
TITLES = {
    "val": "Held-out text",
    "wikitext": "WikiText",
    "lambada": "LAMBADA",
    "core": "CORE",
    "core-extended": "CORE-Extended",
    "zero-shot": "Zero-shot",
}
MEASURES = {
    "loss": "loss",
    "perplexity": "perplexity",
    "word_perplexity": "word perplexity",
    "byte_perplexity": "byte perplexity",
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
}
PERCENT = {"accuracy"}
PANELS_IN_A_ROW = 3


def tables(result: Tree, published: Mapping[str, Scores]) -> Iterator[Table]:
    for name, suite in result["suites"].items():
        if name in ("core", "core-extended"):
            yield _context_table(name, suite, result, published)
        elif name == "zero-shot":
            yield _zero_shot_table(suite, result)
        else:
            yield _text_table(name, suite, result)


def _context_table(name: str, suite: Tree, result: Tree, published: Mapping[str, Scores]) -> Table:
    """Centred scores in percent, T by T, with others' beside them."""
    loops = _loops(suite)
    rows = []
    for task, found in suite["tasks"].items():
        theirs = [_percent(scores.get(task)) for scores in published.values()]
        if found is None:
            rows.append((task, "", "missing", *[""] * len(loops), *theirs))
            continue
        kind = f"{SHORT_KINDS[found['type']]}, {found['shots']}"
        at = found["by_loops"]
        ours = [_percent(at[t] and at[t]["centred"]) for t in loops]
        rows.append((_marked(task, found), kind, _scored(found), *ours, *theirs))
    whole = [_with_deviation(suite["by_loops"][t]) for t in loops]
    theirs = [
        _percent(scores.get("CORE")) if name == "core" else "" for scores in published.values()
    ]
    rows.append((f"{TITLES[name]}, {over(suite)}", "", "", *whole, *theirs))
    columns = ("task", "type, shots", "items", *_headings(loops, result), *published)
    title = f"{TITLES[name]}: centred accuracy in %, baselines of {suite['baselines']}"
    return console.table(f"{title}, {len(suite['seeds'])} seeds", columns, rows)


def _zero_shot_table(suite: Tree, result: Tree) -> Table:
    loops = _loops(suite)
    rows = []
    for task, found in suite["tasks"].items():
        if found is None:
            rows.append((task, "missing", "", *[""] * len(loops)))
            continue
        at = found["by_loops"]
        accuracy = [_percent(at[t] and at[t]["accuracy"]) for t in loops]
        where = f"{Path(found['file']).name} ({found['split']})"
        rows.append((task, where, found["scored"], *accuracy))
    whole = [_percent(at and at["score"]) for at in suite["by_loops"].values()]
    rows.append((f"mean, {over(suite)}", "", "", *whole))
    columns = ("task", "file (split)", "items", *_headings(loops, result))
    return console.table("Zero-shot: accuracy in %", columns, rows)


def _text_table(name: str, suite: Tree, result: Tree) -> Table:
    loops = _loops(suite)
    at = suite["by_loops"]
    rows = [
        (title, *(_measure(measure, at[t]) for t in loops))
        for measure, title in MEASURES.items()
        if any(found and measure in found for found in at.values())
    ]
    place = f": {Path(suite['file']).name}" if "file" in suite else ""
    title = f"{TITLES[name]}{place}" if place or rows else f"{TITLES[name]}: its data is missing"
    return console.table(title, ("", *_headings(loops, result)), rows)


def picture(result: Tree, path: Path, published: Mapping[str, Scores]) -> Path | None:
    """One panel for each suite that has numbers; None where there is none, or no loop to vary."""
    panels = [panel for panel in _panels(result) if len(panel[2]) > 1]
    if not panels or not result["looped"]:
        return None
    columns = min(len(panels), PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    with draw.figure(rows, columns, width=4.2, height=3.4) as (canvas, _):
        for spare in canvas.axes[len(panels) :]:
            spare.remove()
        for axis, (title, unit, points, spread) in zip(canvas.axes, panels, strict=True):
            loops, values = list(points), list(points.values())
            axis.errorbar(loops, values, yerr=spread, marker="o", capsize=3)
            axis.set(title=title, xlabel="loops T", ylabel=unit)
            axis.set_xscale("log", base=2)
            axis.set_xticks(loops, [str(t) for t in loops])
            axis.minorticks_off()
            if title.startswith("CORE,") and (small := published.get("GPT-2", {}).get("CORE")):
                axis.axhline(100 * small, color=draw.PALETTE[5], linestyle="--", linewidth=1)
                axis.annotate("GPT-2", (loops[0], 100 * small), va="bottom", color=draw.PALETTE[5])
        return draw.save(canvas, path)


Panel = tuple[str, str, dict[int, float], list[float] | None]


def _panels(result: Tree) -> Iterator[Panel]:
    """Title, unit, value by loops, deviation."""
    for name, suite in result["suites"].items():
        at = {int(t): found for t, found in suite["by_loops"].items() if found}
        if name in ("core", "core-extended", "zero-shot"):
            points = {t: 100 * found["score"] for t, found in at.items()}
            spread = [100 * found["deviation"] for found in at.values() if found.get("deviation")]
            unit = "accuracy in %" if name == "zero-shot" else "centred accuracy in %"
            whole = spread if len(spread) == len(points) else None
            yield f"{TITLES[name]}, {over(suite)}", unit, points, whole
            continue
        measure = "word_perplexity" if name == "wikitext" else "perplexity"
        points = {t: found[measure] for t, found in at.items() if found.get(measure)}
        yield TITLES[name], MEASURES[measure], points, None


def over(suite: Tree) -> str:
    return f"{suite['tasks_scored']} of {suite['tasks_wanted']} tasks"


def _loops(suite: Tree) -> list[str]:
    return list(suite["by_loops"])


def _headings(loops: Sequence[str], result: Tree) -> list[str]:
    return [f"T={t}" for t in loops] if result["looped"] else ["score"]


def _marked(task: str, found: Tree) -> str:
    return f"{task} *" if found["stand_in"] else task


def _scored(found: Tree) -> str:
    some = found["scored"] < found["items"]
    return f"{found['scored']:,} of {found['items']:,}" if some else f"{found['items']:,}"


def _with_deviation(at: Tree | None) -> str:
    if at is None:
        return "–"
    some = at["deviation"] is not None
    return _percent(at["score"]) + (f" ± {100 * at['deviation']:.1f}" if some else "")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{round(100 * value, 1) + 0.0:.1f}"  # no -0.0


def _measure(measure: str, at: Tree | None) -> str:
    value = None if at is None else at.get(measure)
    if value is None:
        return "–"
    if measure in PERCENT:
        return f"{100 * value:.1f} %"
    return f"{value:,.3f}" if value < 1e6 else f"{value:.3g}"
