"""The report page: one self-contained HTML file, its figures as PNG files and its table of runs."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from parcae import console, plotting
from parcae.config import require
from parcae.files import (
    FileError,
    atomic_path,
    check_links,
    open_file,
    path_inside,
    write_text,
)
from parcae.laws.fit import FIT_FILE, PAGE_FILE, ModelLaws, read_fit
from parcae.laws.table import TABLE_FILE
from parcae.recipe import flatten
from parcae.report.comparison import TITLES, compare
from parcae.report.figures import LOOP, TRAINING
from parcae.report.panel import Figure
from parcae.report.runs import AXES, Axis, Run, Sweep, note_on_validation, number, read_sources
from parcae.report.seeds import NOTE, shown
from parcae.report.tables import (
    NONE,
    count,
    decimal,
    describe_model,
    differences,
    duration,
    events,
    plain_value,
    runs_table,
    table,
)
from parcae.runs.layout import REPORT_FOLDER
from parcae.tables import Row

TABLE_SUFFIXES = {"markdown": ".md", "csv": ".csv", "latex": ".tex"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)
"""The content security policy of the page: the browser loads, runs and sends nothing."""
LARGEST_PICTURE = 1 << 24


def write_report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    axis: Axis = "step",
    follow_links: bool = False,
) -> Path:
    """Write a self-contained HTML page about any number of runs, and their table.

    Args:
        runs: The folder of a run or a sweep, or several.
        out: Folder for report.html, its figures as PNG and the table of runs as runs.md, runs.csv
            and runs.tex. Default: `report` in the folder of the run or sweep; out/report for
            several.
        axis: What figures over training have along x at first: "step", "tokens" or "flops". The
            page shows any of them; the PNG files have this one.
        follow_links: Write where a symbolic link leads out of the folder that `report` is in.
            Default: such a link is refused.

    Returns:
        The path of report.html.
    """
    require(axis in AXES, "axis", f"{axis!r} is not known", f"Use {', '.join(AXES)}.")
    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    require(bool(folders), "runs", "none is given", "Give the folder of a run.")
    sources = read_sources(folders)
    if out is None:
        folder = Path("out" if len(folders) > 1 else folders[0])
        check_links(folder, [REPORT_FOLDER], follow_links)
        out = folder / REPORT_FOLDER
    return write_page(*sources, Path(out), axis)


def write_page(
    runs: Sequence[Run], sweeps: Sequence[Sweep], out: Path, axis: Axis = "step"
) -> Path:
    """Draw the figures of the runs, and write them, the table and the page into `out`."""
    training, loop = (
        [figure for draw in draws if (figure := draw(runs, axis))] for draws in (TRAINING, LOOP)
    )
    for figure in (*training, *loop):
        with atomic_path(out / f"{figure.name}.png") as temporary:
            temporary.write_bytes(figure.png)
    comparison = compare(*(run.folder for run in runs))
    for format, suffix in TABLE_SUFFIXES.items():
        write_text(out / f"runs{suffix}", comparison.format(format))  # type: ignore[arg-type]
    html = page(runs, sweeps, training, loop, out, axis, comparison.seeds)
    write_text(out / "report.html", html)
    return out / "report.html"


def page(
    runs: Sequence[Run],
    sweeps: Sequence[Sweep],
    training: Sequence[Figure],
    loop: Sequence[Figure],
    out: Path,
    axis: Axis,
    seeds: Sequence[Row] = (),
) -> str:
    """The HTML of the page; `seeds` are the rows of `Comparison.seeds`."""
    css = resources.files("parcae.report").joinpath("page.css").read_text(encoding="utf-8")
    title = runs[0].title
    if sweeps:
        names = ", ".join(sweep.folder.resolve().name for sweep in sweeps)
        title = f"{names}: {console.format_items(len(runs), 'run')}"
    elif len(runs) > 1:
        title = f"{console.format_items(len(runs), 'run')} compared"
    sections = [
        headlines(runs, sweeps),
        _section("Over seeds", _over_seeds(seeds)),
        _section("Training", _axes(training) + _figures(training)),
        _section("Inside the loop", _figures(loop)),
        _section("Samples", samples(runs)),
        *(_section("Table and fit of the sweep", sweep_section(sweep, out)) for sweep in sweeps),
        _section("Events", events(runs)),
        _section("Differences between the recipes", differences(runs)),
        _section("Recipe and result", details(runs)),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)} – Parcae report</title>
<style>
{plotting.page_style()}{css}</style>
</head>
<body>
<main>
{_axis_inputs(axis)}<h1>{escape(title)}</h1>
{_introduction(runs[0]) if len(runs) == 1 else ""}
{"".join(sections)}</main>
</body>
</html>
"""


def headlines(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> str:
    """What a reader has to know first: diagnoses, then the numbers of the runs."""
    notes = [
        f"<b>{escape(run.name)}:</b> {escape(str(diagnosis))}"
        for run in runs
        if (diagnosis := run.value("diagnosis"))
    ]
    notes += [
        f"{escape(str(sweep.folder))}: {console.format_items(missing, 'run')} of {sweep.planned} "
        "not started yet."
        for sweep in sweeps
        if (missing := sweep.planned - _count_inside(runs, sweep))
    ]
    if note := note_on_validation(runs):
        notes.append(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(note)))
    listed = "".join(f'<p class="note" role="note">{note}</p>\n' for note in notes)
    return f"<section>\n{listed}<h2>Summary</h2>\n{runs_table(runs)}</section>\n"


def _over_seeds(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    head, cells = shown(rows, TITLES)
    return table(head, cells, kind="runs") + f"<p>{escape(NOTE)}</p>\n"


def _count_inside(runs: Sequence[Run], sweep: Sweep) -> int:
    folder = sweep.folder.resolve()
    return sum(run.folder.resolve().is_relative_to(folder) for run in runs)


def sweep_section(sweep: Sweep, out: Path) -> str:
    """Links to the table and the page of the laws, what was fitted, and the figures of the fit."""
    fit = sweep.folder / "fit"
    links = [
        f'<a href="{escape(quote(os.path.relpath(path, out)))}">{escape(what)}</a>'
        for path, what in (
            (sweep.folder / TABLE_FILE, "table of runs (CSV)"),
            (fit / PAGE_FILE, "interactive page of the laws"),
        )
        if path.exists()
    ]
    parts = [f"<p>{' · '.join(links)}</p>\n"] if links else []
    if (fit / FIT_FILE).exists():
        parts += [_fit(model.model, model) for model in read_fit(fit).values()]
        drawn = "".join(_picture(path) for path in sorted(fit.glob("*.svg")))
        parts.append(f'<div class="figures">\n{drawn}</div>\n' if drawn else "")
    return "".join(parts)


def _picture(path: Path) -> str:
    """A figure of the fit as an image, in which a browser runs no script and follows no link; none
    where it is no file of the folder."""
    try:
        with open_file(path_inside(path.parent, path.name), LARGEST_PICTURE) as stream:
            content = base64.b64encode(stream.read()).decode()
    except FileError:
        return ""
    source = f"data:image/svg+xml;base64,{content}"
    return f'<figure><img src="{source}" alt="{escape(path.stem)}"></figure>\n'


def _fit(name: str, model: ModelLaws) -> str:
    """The parameters of a model's laws with their intervals, and what was not fitted."""
    rows = [
        [f"{law.law.formula}: {key}", f"{value:.4g}", _interval(law.intervals.get(key))]
        for law_name, law in model.laws.items()
        if "/" not in law_name
        for key, value in law.values.items()
    ]
    reasons = [f"{law} was not fitted: {reason}" for law, reason in model.not_fitted.items()]
    notes = "".join(f"<li>{escape(text)}</li>\n" for text in (*reasons, *model.warnings))
    listed = f"<ul>\n{notes}</ul>\n" if notes else ""
    laws = table(["Parameter", "Value", "90 % interval"], rows) if rows else ""
    return f"<h3>{escape(name)}</h3>\n{laws}{listed}"


def _interval(ends: tuple[float, float] | None) -> str:
    return NONE if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"


def summary(run: Run) -> str:
    """A run in one line."""
    last = run.validations[-1].depths if run.validations else {}
    at = [
        f"{decimal(last[depth].loss, 3)} at T = {depth}"
        for depth in dict.fromkeys((run.nominal_depth, 1))
        if depth in last
    ]
    parts = [
        describe_model(run),
        f"{count(run.parameters)} parameters",
        f"{count(run.amount('tokens'))} tokens",
        f"validation loss {', '.join(at)}" if at else "not validated",
        duration(run.amount("seconds")),
        *([f"starts from {run.start}"] if run.start else []),
    ]
    return " · ".join(part for part in parts if not part.startswith(NONE))


def samples(runs: Sequence[Run]) -> str:
    """The samples of each prompt by increasing loops; the runs side by side."""
    prompts: dict[str, list[tuple[float, str, str]]] = {}
    for run in runs:
        listed = run.value("samples")
        for sample in listed if isinstance(listed, list) else ():
            if isinstance(sample, dict):
                depth = f"T = {plain_value(sample.get('depth'))}"
                label = f"{run.name}, {depth}" if len(runs) > 1 else depth
                prompt = str(sample.get("prompt") or "")
                one = (number(sample.get("depth")), label, str(sample.get("text") or ""))
                prompts.setdefault(prompt, []).append(one)
    return "".join(
        f"<h3>“{escape(prompt)}”</h3>\n"
        '<div class="samples">'
        + "".join(
            f'<div class="sample"><span class="soft">{escape(label)}</span>'
            f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre></div>\n"
            for _, label, text in sorted(texts, key=lambda one: one[0])
        )
        + "</div>\n"
        for prompt, texts in prompts.items()
    )


def details(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        name = f" of {run.name}" if len(runs) > 1 else ""
        parts.append(_details(f"Recipe{name}", f"<pre>{escape(run.recipe_text)}</pre>"))
        if run.result is not None:
            shown = {key: value for key, value in run.result.to_dict().items() if key != "samples"}
            rows = [[key, plain_value(value)] for key, value in flatten(shown).items()]
            parts.append(_details(f"Result{name}", table(["Key", "Value"], rows, kind="text")))
    return "".join(parts)


def _introduction(run: Run) -> str:
    known = ("finished", "diverged", "interrupted")
    kind = f" {run.status}" if run.status in known else ""
    return (
        f'<p class="run"><span class="badge{kind}">{escape(run.status)}</span> '
        f"{escape(summary(run))}</p>\n"
    )


def _axis_inputs(axis: Axis) -> str:
    """The state of the radio buttons; the style sheet shows the figures of the one checked."""
    return "".join(
        f'<input class="axis" type="radio" name="x" id="x-{name}" '
        f'aria-label="Figures over {label}"{" checked" if name == axis else ""}>\n'
        for name, label in AXES.items()
    )


def _axes(figures: Sequence[Figure]) -> str:
    """The labels of the radio buttons."""
    labels = "".join(
        f'<label for="x-{name}">{label}</label>'
        for name, label in AXES.items()
        if any(name in figure.svg for figure in figures)
    )
    return f'<p class="axes">Figures over {labels}</p>\n' if labels else ""


def _figures(figures: Sequence[Figure]) -> str:
    drawn = "".join(
        f"<figure>{_variants(figure)}<figcaption>{escape(figure.caption)}</figcaption></figure>\n"
        for figure in figures
    )
    return f'<div class="figures">\n{drawn}</div>\n' if drawn else ""


def _variants(figure: Figure) -> str:
    return "".join(
        svg if axis is None else f'<div class="x-{axis}">{svg}</div>'
        for axis, svg in figure.svg.items()
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n" if body else ""


def _details(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{body}</details>\n"
