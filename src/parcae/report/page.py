"""The report page: one self-contained HTML file, and its figures as PNG files beside it."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from parcae import plotting
from parcae.files import atomic_path, write_text
from parcae.report.figures import LOOP, TRAINING
from parcae.report.html import (
    NONE,
    count,
    decimal,
    duration,
    flatten,
    flops,
    percent,
    plain_value,
    table,
    whole,
)
from parcae.report.panel import Figure
from parcae.report.runs import Measured, Run, number, read_runs
from parcae.runs.layout import REPORT_FOLDER

SHOWN_EVENTS = 50
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The content security policy of the page: the browser loads and runs nothing."""


def write_report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write a self-contained HTML page about one run, or a comparison of several.

    Args:
        runs: The folder of a run, or several.
        out: Folder for report.html and its figures. Default: RUN/report, or out/report for several.

    Returns:
        The path of report.html.
    """
    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    several = len(folders) > 1
    default = Path("out") / REPORT_FOLDER if several else Path(folders[0]) / REPORT_FOLDER
    return write_page(read_runs(folders), default if out is None else Path(out))


def write_page(runs: Sequence[Run], out: Path) -> Path:
    """Draw the figures of the runs, and write them and the page into `out`."""
    training = [figure for draw in TRAINING if (figure := draw(runs))]
    loop = [figure for draw in LOOP if (figure := draw(runs))]
    for figure in (*training, *loop):
        with atomic_path(out / f"{figure.name}.png") as temporary:
            temporary.write_bytes(figure.png)
    write_text(out / "report.html", page(runs, training, loop))
    return out / "report.html"


def page(runs: Sequence[Run], training: Sequence[Figure], loop: Sequence[Figure]) -> str:
    """The HTML of the page."""
    css = resources.files("parcae.report").joinpath("page.css").read_text(encoding="utf-8")
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs compared"
    sections = [
        headlines(runs),
        _section("Training", _figures(training)),
        _section("Inside the loop", _figures(loop)),
        _section("Samples", samples(runs)),
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
{css}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{"".join(_introduction(i, run, len(runs)) for i, run in enumerate(runs))}
{"".join(sections)}</main>
</body>
</html>
"""


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


def describe_model(run: Run) -> str:
    config = run.config
    if config is None:
        return "a model of another version of parcae"
    if config.architecture == "transformer":
        return f"Transformer, {config.layers} layers, width {config.width}"
    layers = f"{config.prelude_layers}+{config.core_layers}+{config.coda_layers} layers"
    mean = f"{config.loop.mean_loops:g} loops"
    return f"looped ({config.injection}), {layers}, width {config.width}, {mean}"


def headlines(runs: Sequence[Run]) -> str:
    """Numbers of the runs: in groups for one run, a column per run for several."""
    notes = "".join(
        f'<p class="note" role="note"><b>{escape(run.name)}:</b> {escape(str(diagnosis))}</p>\n'
        for run in runs
        if (diagnosis := run.value("diagnosis"))
    )
    groups = {
        caption: [cells for cells in rows if any(cell != NONE for cell in cells[1:])]
        for caption, rows in {"Training": _cost_rows(runs), "Result": _loss_rows(runs)}.items()
    }
    if len(runs) > 1:
        rows = [cells for group in groups.values() for cells in group]
        numbers = table(["", *(run.name for run in runs)], rows, kind="compared")
        return f"{notes}<h2>Summary</h2>\n{numbers}{_validations(runs)}"
    tables = "".join(table(["", ""], rows, caption) for caption, rows in groups.items())
    return f"{notes}<h2>Summary</h2>\n{_tables(tables + _validation(runs[0], 'Validation'))}"


def _cost_rows(runs: Sequence[Run]) -> list[list[str]]:
    return [
        ["Status", *(run.status for run in runs)],
        ["Parameters", *(whole(run.parameters) for run in runs)],
        ["Steps", *(whole(run.amount("steps")) for run in runs)],
        ["Tokens", *(count(run.amount("tokens")) for run in runs)],
        ["FLOPs, nominal", *(flops(run.amount("flops")) for run in runs)],
        ["FLOPs, executed", *(flops(run.amount("executed_flops")) for run in runs)],
        ["Time", *(duration(run.amount("seconds")) for run in runs)],
        ["Tokens per second, median", *(count(run.median("tokens_per_second")) for run in runs)],
        ["Fraction of the device's peak", *(percent(run.median("peak_fraction")) for run in runs)],
        ["Device", *(plain_value(run.value("device")) for run in runs)],
        ["Seed", *(_seed(run) for run in runs)],
    ]


def _loss_rows(runs: Sequence[Run]) -> list[list[str]]:
    final = [run.validations[-1].depths if run.validations else {} for run in runs]
    nominal = [one.get(run.nominal_depth or 0) for one, run in zip(final, runs, strict=True)]
    return [
        ["Training loss", *(decimal(run.train_loss) for run in runs)],
        ["Loops T", *(whole(run.nominal_depth or math.nan) for run in runs)],
        ["Validation loss at T", *(_field(one, "loss") for one in nominal)],
        ["Perplexity at T", *(_field(one, "perplexity") for one in nominal)],
        ["Bits per byte at T", *(_field(one, "bits_per_byte") for one in nominal)],
        ["Validation loss at T = 1", *(_field(one.get(1), "loss") for one in final)],
        ["Skipped steps", *(_event_count(run, "skipped_steps", "skipped") for run in runs)],
        ["Spikes", *(_event_count(run, "spikes", "spike") for run in runs)],
    ]


def _validations(runs: Sequence[Run]) -> str:
    tables = "".join(_validation(run, f"{run.name}: validation") for run in runs)
    return f"<h3>Validation by loops</h3>\n{_tables(tables)}" if tables else ""


def _validation(run: Run, what: str) -> str:
    if not run.validations:
        return ""
    last = run.validations[-1]
    rows = [
        [str(depth), *(_field(one, key) for key in ("loss", "perplexity", "bits_per_byte"))]
        for depth, one in last.depths.items()
    ]
    head = ["T", "Loss", "Perplexity", "Bits per byte"]
    return table(head, rows, f"{what} with T loops after step {whole(last.step)}")


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


def events(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        rows = [
            [whole(number(e.get("step"))), str(e.get("what", "")), str(e.get("message") or "")]
            for e in run.events
        ]
        if rows:
            more = len(rows) - SHOWN_EVENTS
            rest = f", the last {SHOWN_EVENTS} of {len(rows)}" if more > 0 else ""
            caption = f"{run.name}{rest}" if len(runs) > 1 or rest else ""
            shown = rows[-SHOWN_EVENTS:]
            parts.append(table(["Step", "Event", "Message"], shown, caption, kind="text"))
    return _tables("".join(parts)) if parts else ""


def differences(runs: Sequence[Run]) -> str:
    """A table of the settings that differ between the recipes."""
    if len(runs) < 2:
        return ""
    flat = [flatten(run.recipe) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [
        [key, *(plain_value(one.get(key)) for one in flat)]
        for key in keys
        if any(one.get(key) != flat[0].get(key) for one in flat)
    ]
    if not rows:
        return "<p>None.</p>\n"
    return table(["Key", *(run.name for run in runs)], rows, kind="compared")


def details(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        name = f" of {run.name}" if len(runs) > 1 else ""
        parts.append(_details(f"Recipe{name}", f"<pre>{escape(run.recipe_text)}</pre>"))
        if run.result is not None:
            shown = {key: value for key, value in run.result.items() if key != "samples"}
            rows = [[key, plain_value(value)] for key, value in flatten(shown).items()]
            parts.append(_details(f"Result{name}", table(["Key", "Value"], rows, kind="text")))
    return "".join(parts)


def _introduction(index: int, run: Run, count: int) -> str:
    known = ("finished", "diverged", "interrupted")
    kind = f" {run.status}" if run.status in known else ""
    dot = (
        f'<span class="dot" style="background:{plotting.colour(index)}"></span>'
        if count > 1
        else ""
    )
    name = f"<b>{escape(run.name)}</b> · " if count > 1 else ""
    return (
        f'<p class="run">{dot}{name}<span class="badge{kind}">{escape(run.status)}</span> '
        f"{escape(summary(run))}</p>\n"
    )


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    drawn = "".join(
        f'<figure><img alt="{escape(figure.alt)}" '
        f'src="data:image/png;base64,{base64.b64encode(figure.png).decode()}">'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>\n"
        for figure in figures
    )
    return f'<div class="figures">\n{drawn}</div>\n'


def _tables(tables: str) -> str:
    return f'<div class="tables">{tables}</div>\n'


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n" if body else ""


def _details(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{body}</details>\n"


def _field(measured: Measured | None, name: str) -> str:
    if measured is None:
        return NONE
    return decimal(getattr(measured, name), 2 if name == "perplexity" else 4)


def _event_count(run: Run, key: str, what: str) -> str:
    """From the result, or counted in the events of a run without one."""
    if run.result is None:
        return str(sum(event.get("what") == what for event in run.events))
    return whole(number(run.value(key)))


def _seed(run: Run) -> str:
    if run.result is not None:
        return plain_value(run.value("seed"))
    settings = run.recipe.get("run")
    return plain_value(settings.get("seed")) if isinstance(settings, dict) else NONE
