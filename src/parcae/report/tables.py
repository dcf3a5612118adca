"""The tables of the report page: runs, validation, events, differences; cells are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from typing import Any, Literal

from parcae import console, plotting
from parcae.recipe import flatten
from parcae.report.runs import Measured, Run, number

NONE = "–"
SHOWN_EVENTS = 50


def count(value: float) -> str:
    return NONE if math.isnan(value) else console.format_count(value)


def flops(value: float) -> str:
    return NONE if math.isnan(value) else console.format_flops(value)


def whole(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:,.0f}"


def decimal(value: float, digits: int = 4) -> str:
    return NONE if math.isnan(value) else f"{value:,.{digits}f}"


def percent(value: float) -> str:
    return NONE if math.isnan(value) else f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return NONE
    return console.format_duration(seconds)


def plain_value(value: Any) -> str:
    """A setting or a result as in its file."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    *,
    kind: Literal["numbers", "text", "runs"] = "numbers",
    keys: Sequence[str] = (),
) -> str:
    """An HTML table that scrolls if it is wide; the first cell of each row is its header.

    `keys` are HTML in front of the headers of the rows.
    """
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    top = f"<thead><tr>{top}</tr></thead>\n" if any(head) else ""
    body = "".join(
        f'<tr><th scope="row">{key or ""}{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row, key in zip_longest(rows, keys)
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">{title}{top}'
        f"<tbody>{body}</tbody></table></div>\n"
    )


def side_by_side(tables: str) -> str:
    return f'<div class="tables">{tables}</div>\n'


def runs_table(runs: Sequence[Run]) -> str:
    """The numbers of the runs: in groups for one run, a row per run for several."""
    groups = {
        caption: [cells for cells in rows if any(cell != NONE for cell in cells[1:])]
        for caption, rows in {"Training": _cost_rows(runs), "Result": _loss_rows(runs)}.items()
    }
    if len(runs) == 1:
        tables = "".join(table(["", ""], rows, caption) for caption, rows in groups.items())
        return side_by_side(tables + _validation(runs[0]))
    (status, *cost), result = groups.values()
    cost.append(["Model", *(describe_model(run) for run in runs)])
    if any(run.start for run in runs):
        cost.append(["Starts from", *(run.start or NONE for run in runs)])
    keys = [line_key(index) for index in range(len(runs))]
    tables = ""
    for caption, columns in (("Result", [status, *result]), ("Training", cost)):
        rows = zip([run.name for run in runs], *(cells[1:] for cells in columns), strict=True)
        head = ["Run", *(cells[0] for cells in columns)]
        tables += table(head, rows, caption, kind="runs", keys=keys)
    return tables + _validations(runs, keys)


def describe_model(run: Run) -> str:
    config = run.config
    if config is None:
        return "unknown: of another version of parcae, or of a file that --import names"
    if config.architecture == "transformer":
        return f"Transformer, {config.layers} layers, width {config.width}"
    layers = f"{config.prelude_layers}+{config.core_layers}+{config.coda_layers} layers"
    mean = f"{config.loop.mean_loops:g} loops"
    return f"looped ({config.injection}), {layers}, width {config.width}, {mean}"


def line_key(index: int) -> str:
    """A line with the colour and dashes that the run has in the figures."""
    color = index % len(plotting.PALETTE)
    dashes = {"-": "none", "--": "6 3", ":": "1.5 2", "-.": "6 2 1.5 2"}[plotting.dash(index)]
    return (
        '<svg class="key" viewBox="0 0 24 8" aria-hidden="true"><line x1="0" x2="24" y1="4" '
        f'y2="4" style="stroke:var(--c{color});stroke-width:3;stroke-dasharray:{dashes}"/></svg>'
    )


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


def _validations(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """The loss of the last validation of each run, by number of loops."""
    final = [run.validations[-1].depths if run.validations else {} for run in runs]
    depths = sorted({depth for of_run in final for depth in of_run})
    if not depths:
        return ""
    rows = [
        [run.name, *(_field(of_run.get(depth), "loss") for depth in depths)]
        for run, of_run in zip(runs, final, strict=True)
    ]
    head = ["Run", *(f"T = {depth}" for depth in depths)]
    listed = table(head, rows, "Loss of the last validation with T loops", kind="runs", keys=keys)
    return f"<h3>Validation by loops</h3>\n{listed}"


def _validation(run: Run) -> str:
    if not run.validations:
        return ""
    last = run.validations[-1]
    rows = [
        [str(depth), *(_field(one, key) for key in ("loss", "perplexity", "bits_per_byte"))]
        for depth, one in last.depths.items()
    ]
    head = ["T", "Loss", "Perplexity", "Bits per byte"]
    return table(head, rows, f"Validation with T loops after step {whole(last.step)}")


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
    return side_by_side("".join(parts)) if parts else ""


def differences(runs: Sequence[Run]) -> str:
    """A table of the settings that differ between the recipes."""
    if len(runs) < 2:
        return ""
    flat = [flatten(run.recipe) for run in runs]
    settings = dict.fromkeys(key for one in flat for key in one)
    different = [key for key in settings if any(one.get(key) != flat[0].get(key) for one in flat)]
    if not different:
        return "<p>None.</p>\n"
    rows = [
        [run.name, *(plain_value(one.get(key)) for key in different)]
        for run, one in zip(runs, flat, strict=True)
    ]
    keys = [line_key(index) for index in range(len(runs))]
    return table(["Run", *different], rows, kind="runs", keys=keys)


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
