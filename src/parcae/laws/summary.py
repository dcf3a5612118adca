"""The tables and warnings of a fit, for the terminal and for summary.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcae.console import format_count, format_flops, format_items
from parcae.laws.bootstrap import CONFIDENCE, Estimate, LawResult
from parcae.laws.fit import FitResult, ModelFit, sentence_without
from parcae.tables import MISSING, escape_markdown, markdown_table


@dataclass(frozen=True)
class SummaryTable:
    """A table of text cells: names in the first column, numbers in the others."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary_tables(result: FitResult) -> Iterator[SummaryTable]:
    """All tables of a fit that have rows."""
    models = list(result.models.values())
    for model in models:
        yield from _laws(model)
    tables = (
        _power_laws(models),
        _fixed_depth(models),
        _forms(models),
        _recovery(models),
        _conditionings(models),
        _held_out(models),
        _gaps(result),
    )
    yield from (table for table in tables if table.rows)


def notes(result: FitResult) -> dict[str, list[str]]:
    """By model: the laws that were not fitted and why, and the warnings."""
    lines = {}
    for name, model in result.models.items():
        reasons: dict[str, list[str]] = {}
        for law, reason in model.not_fitted.items():
            reasons.setdefault(reason, []).append(law)
        listed = [
            f"not fitted: {', '.join(laws)}. {sentence_without(name, why)}"
            for why, laws in reasons.items()
        ]
        if listed or model.warnings:
            lines[name] = [*listed, *model.warnings]
    return lines


def markdown(result: FitResult, figures: Sequence[str] = ()) -> str:
    """The text of summary.md, with links to the figures."""
    data, samples = result.data, result.settings.bootstrap_samples
    checksum = f" (sha256 {data.sha256[:12]}…)" if data.sha256 else ""
    intervals = f" Intervals are {100 * CONFIDENCE:.0f} % intervals of {samples} bootstrap samples."
    parts = [
        "# Scaling laws\n",
        f"{format_items(len(data), 'loss', 'losses')} from "
        f"{escape_markdown(str(data.source))}{checksum}.{intervals if samples else ''}\n",
    ]
    for model, lines in notes(result).items():
        listed = "\n".join(f"- {escape_markdown(line)}" for line in lines)
        parts.append(f"**{escape_markdown(model)}**\n\n{listed}\n")
    for table in summary_tables(result):
        title = escape_markdown(table.title)
        parts.append(f"## {title}\n\n{markdown_table(table.columns, table.rows)}")
    parts += [f"![{name.partition('.')[0]}]({name})\n" for name in figures]
    return "\n".join(parts)


def _laws(model: ModelFit) -> Iterator[SummaryTable]:
    for name in ("training", "unified"):
        law = model.laws.get(name)
        if law is None or law.quality is None:
            continue
        intervals = law.intervals
        rows = [
            (key, f"{value:.4g}", _interval(intervals.get(key)))
            for key, value in law.values.items()
        ]
        title = f"{model.model}: {law.law.formula}"
        yield SummaryTable(title, ("parameter", "value", "90 % interval"), rows)
        title = f"{model.model}: fit of the {name} law"
        yield SummaryTable(title, ("", "value"), _quality(law))


def _quality(law: LawResult) -> list[tuple[str, ...]]:
    quality = law.quality
    assert quality is not None
    rows = [
        ("losses", f"{quality.points}"),
        ("sum of Huber losses", f"{quality.objective:.3g}"),
        ("R²", f"{quality.r_squared:.5f}"),
        ("mean error", _percent(quality.mean_error)),
        ("largest error", _percent(quality.max_error)),
    ]
    if starts := law.starts:
        rows += [
            ("starts", f"{starts.tried}"),
            ("followed to the end", f"{starts.followed}"),
            ("of these, converged", f"{starts.converged}"),
            ("of these, found this optimum", f"{starts.agreeing}"),
        ]
    if law.left_out:
        mean = sum(law.left_out.values()) / len(law.left_out)
        worst = max(law.left_out, key=lambda budget: law.left_out[budget])
        rows.append(("mean error at a budget left out", _percent(mean)))
        rows.append((f"largest, at {format_flops(worst)} FLOPs", _percent(law.left_out[worst])))
    return rows


def _power_laws(models: list[ModelFit]) -> SummaryTable:
    rows = []
    for model in models:
        for name, law in model.power_laws.items():
            ends = _interval(model.power_law_intervals.get(name))
            count = str(len(law.budgets))
            rows.append((model.model, f"optimal {name}", f"{law.exponent:.3f}", ends, count))
    columns = ("model", "optimum", "exponent of FLOPs", "90 % interval", "budgets used")
    return SummaryTable("Power laws of the parabolas' optima", columns, rows)


def _fixed_depth(models: list[ModelFit]) -> SummaryTable:
    rows = []
    for model in models:
        for row in model.fixed_depth:
            gain = MISSING if row.fixed_loss is None else f"{row.fixed_loss - row.best_loss:+.4f}"
            rows.append(
                (
                    model.model,
                    format_flops(row.budget),
                    f"{row.best_loops:g}",
                    f"{row.best_loss:.4f}",
                    MISSING if row.fixed_loss is None else f"{row.fixed_loss:.4f}",
                    gain,
                    _estimate(row.law_loops, 1) + _beyond(row.law_loops, model),
                    _estimate(row.law_loss, 4),
                )
            )
    columns = (
        "model",
        "FLOPs",
        "μ of the best run",
        "its loss",
        "loss at fixed depth",
        "gain",
        "optimal μ by the law",
        "loss by the law",
    )
    return SummaryTable("Looping compared with fixed depth", columns, rows)


def _forms(models: list[ModelFit]) -> SummaryTable:
    rows = [
        (
            model.model,
            score.law.formula,
            f"{1e7 * score.inside:.3g}",
            MISSING if score.beyond is None else f"{1e7 * score.beyond:.3g}",
            model.test_time.forms_set,
            f"{score.curves} / {score.curves_beyond}",
        )
        for model in models
        if model.test_time is not None
        for score in model.test_time.forms
    ]
    columns = ("model", "form", "all T", "T > μ, fitted to T ≤ μ", "set", "curves")
    return SummaryTable("Test-time forms: average Huber loss in 1e-7", columns, rows)


def _recovery(models: list[ModelFit]) -> SummaryTable:
    rows = []
    for model in models:
        measured = model.test_time and model.test_time.recovery
        if model.test_time and measured:
            numbers = (_percent(measured.mean), _percent(measured.largest))
            rows.append((model.model, *numbers, model.test_time.recovery_set, str(measured.curves)))
    return SummaryTable(
        "Relative difference of L∞ and the loss at T = μ",
        ("model", "mean", "largest", "set", "curves"),
        rows,
    )


def _conditionings(models: list[ModelFit]) -> SummaryTable:
    rows = []
    for model in models:
        for row in model.conditionings:
            rows.append(
                (
                    model.model,
                    row.formula,
                    f"{row.grid:.3g}",
                    f"{row.grid_frozen:.3g}",
                    MISSING if row.held_out is None else f"{row.held_out:.3g}",
                    MISSING if row.held_out_frozen is None else f"{row.held_out_frozen:.3g}",
                    MISSING if row.gamma is None else f"{row.gamma:.3f}",
                )
            )
    columns = ("model", "decay", "grid", "grid, frozen", "end-to-end", "the same, frozen", "γ")
    title = "Dependence of the decay on μ: total Huber loss, jointly fitted and training law frozen"
    return SummaryTable(title, columns, rows)


def _held_out(models: list[ModelFit]) -> SummaryTable:
    rows = []
    for model in models:
        for row in model.held_out:
            rows.append(
                (
                    model.model,
                    row.set,
                    f"{row.mean_loops:g}",
                    format_count(row.tokens),
                    f"{row.measured:.4f}",
                    _estimate(row.predicted, 4),
                    _percent(row.error),
                    MISSING if row.curve_error is None else _percent(row.curve_error),
                    MISSING if row.oracle_error is None else _percent(row.oracle_error),
                )
            )
    columns = (
        "model",
        "set",
        "μ",
        "tokens",
        "measured",
        "predicted",
        "error",
        "error over all T",
        "given the loss at T = μ",
    )
    return SummaryTable("Held-out runs", columns, rows)


def _gaps(result: FitResult) -> SummaryTable:
    rows = [
        (gap.looped, f"{gap.transformer} → {gap.larger}", gap.score, f"{gap.share:.1%}")
        for gap in result.gap_shares
    ]
    columns = ("model", "gap", "score", "closed")
    return SummaryTable("Share of the gap to the next larger Transformer", columns, rows)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _interval(ends: tuple[float, float] | None) -> str:
    return MISSING if ends is None else f"{ends[0]:.4g} … {ends[1]:.4g}"


def _beyond(value: Estimate | None, model: ModelFit) -> str:
    """A remark on a number of loops outside those of the runs."""
    loops = model.runs.points.mean_loops[model.runs.training()]
    inside = value is None or loops.min() <= value.value <= loops.max()
    return "" if inside else ", extrapolated"


def _estimate(value: Estimate | None, digits: int) -> str:
    if value is None:
        return MISSING
    if value.low is None or value.high is None:
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} ({value.low:.{digits}f} … {value.high:.{digits}f})"
