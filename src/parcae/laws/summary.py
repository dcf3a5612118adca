"""A study in words and tables: the same ones for the terminal and for summary.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcae.laws.analysis import ModelStudy, Study
from parcae.laws.bootstrap import LEVEL
from parcae.laws.fit_file import FittedLaw
from parcae.laws.predict import Estimate

NONE = "–"


@dataclass(frozen=True)
class View:
    """A table to show: first column names, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def views(study: Study) -> Iterator[View]:
    """Every table of the study that has rows."""
    several = list(study.models.values())
    for one in several:
        yield from _laws(one)
    made = (
        _power_laws(several),
        _fixed_depth(several),
        _forms(several),
        _recovery(several),
        _conditionings(several),
        _held_out(several),
        _gaps(study),
    )
    yield from (view for view in made if view.rows)


def notes(study: Study) -> dict[str, list[str]]:
    """By model: what was not fitted, and what to be careful about."""
    said = {}
    for name, one in study.models.items():
        reasons: dict[str, list[str]] = {}
        for law, reason in one.not_fitted.items():
            reasons.setdefault(reason, []).append(law)
        listed = [f"not fitted: {', '.join(of)}. {why}" for why, of in reasons.items()]
        if listed or one.warnings:
            said[name] = [*listed, *one.warnings]
    return said


def markdown(study: Study, figures: Sequence[str] = ()) -> str:
    """The whole summary as one page."""
    parts = [
        "# Scaling laws\n",
        f"{len(study.table)} losses from `{study.table.source}`"
        + (f" (sha256 {study.table.sha256[:12]}…)" if study.table.sha256 else "")
        + f". Intervals hold the middle {LEVEL:.0%} of {study.effort.draws} bootstrap replicas.\n",
    ]
    for model, lines in notes(study).items():
        parts.append(f"**{_literal(model)}**\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    for view in views(study):
        head = f"| {' | '.join(view.columns)} |"
        rule = "|---" + "|---:" * (len(view.columns) - 1) + "|"
        body = "\n".join(f"| {' | '.join(map(_literal, row))} |" for row in view.rows)
        parts.append(f"## {_literal(view.title)}\n\n{head}\n{rule}\n{body}\n")
    parts += [f"![{name.partition('.')[0]}]({name})\n" for name in figures]
    return "\n".join(parts)


def _literal(text: str) -> str:
    """A model's name is the user's: it must not end a cell or begin a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _laws(one: ModelStudy) -> Iterator[View]:
    model = one.design.model
    for name in ("training", "unified"):
        fitted = one.laws.get(name)
        if fitted is None or fitted.quality is None:
            continue
        intervals = fitted.intervals()
        rows = [
            (key, f"{value:.4g}", _span(intervals.get(key))) for key, value in fitted.values.items()
        ]
        yield View(f"{model}: {fitted.law.formula}", ("", "value", "interval"), rows)
        yield View(f"{model}: how well {name} fits", ("", "value"), _quality(fitted))


def _quality(fitted: FittedLaw) -> list[tuple[str, ...]]:
    found = fitted.quality
    assert found is not None
    rows = [
        ("losses", f"{found.points}"),
        ("Huber loss, sum", f"{found.objective:.3g}"),
        ("R²", f"{found.r_squared:.5f}"),
        ("error, mean", _percent(found.mean_error)),
        ("error, largest", _percent(found.max_error)),
        ("starts that converged", f"{fitted.converged:.0%}"),
        ("of them, at this optimum", f"{fitted.agreeing:.0%}"),
    ]
    if fitted.left_out:
        mean = sum(fitted.left_out.values()) / len(fitted.left_out)
        worst = max(fitted.left_out, key=lambda budget: fitted.left_out[budget])
        rows.append(("error at a budget left out, mean", _percent(mean)))
        rows.append((f"  largest, at {worst:.3g}", _percent(fitted.left_out[worst])))
    return rows


def _power_laws(several: list[ModelStudy]) -> View:
    rows = []
    for one in several:
        for name, law in one.power_laws.items():
            span = _span(one.power_intervals.get(name))
            rows.append(
                (one.design.model, f"{name}*", f"{law.exponent:.3f}", span, str(len(law.budgets)))
            )
    columns = ("model", "optimum", "exponent of C", "interval", "budgets used")
    return View("Optima of the parabolas", columns, rows)


def _fixed_depth(several: list[ModelStudy]) -> View:
    rows = []
    for one in several:
        for row in one.fixed_depth:
            gain = NONE if row.fixed_loss is None else f"{row.fixed_loss - row.best_loss:+.4f}"
            rows.append(
                (
                    one.design.model,
                    f"{row.budget:.3g}",
                    f"{row.best_loops:g}",
                    f"{row.best_loss:.4f}",
                    NONE if row.fixed_loss is None else f"{row.fixed_loss:.4f}",
                    gain,
                    _estimate(row.law_loops, 1),
                    _estimate(row.law_loss, 4),
                )
            )
    columns = (
        "model",
        "FLOPs",
        "best μ run",
        "loss",
        "at fixed depth",
        "gain",
        "law's μ*",
        "its loss",
    )
    return View("Looping against fixed depth", columns, rows)


def _forms(several: list[ModelStudy]) -> View:
    rows = []
    for one in several:
        for score in one.forms:
            rows.append(
                (
                    one.design.model,
                    score.law.formula,
                    f"{1e7 * score.inside:.3g}",
                    NONE if score.beyond is None else f"{1e7 * score.beyond:.3g}",
                    f"{score.curves} / {score.curves_beyond}",
                )
            )
    columns = ("model", "form", "all T", "T > μ, fitted on T ≤ μ", "curves")
    return View("Test-time forms: average Huber loss, 1e-7", columns, rows)


def _recovery(several: list[ModelStudy]) -> View:
    rows = [
        (
            one.design.model,
            _percent(one.recovery.mean),
            _percent(one.recovery.largest),
            str(one.recovery.curves),
        )
        for one in several
        if one.recovery is not None
    ]
    return View("L∞ against the loss at T = μ", ("model", "mean", "largest", "curves"), rows)


def _conditionings(several: list[ModelStudy]) -> View:
    rows = []
    for one in several:
        for row in one.conditionings:
            rows.append(
                (
                    one.design.model,
                    row.formula,
                    f"{row.grid:.3g}",
                    f"{row.grid_frozen:.3g}",
                    NONE if row.held_out is None else f"{row.held_out:.3g}",
                    NONE if row.held_out_frozen is None else f"{row.held_out_frozen:.3g}",
                    NONE if row.gamma is None else f"{row.gamma:.3f}",
                )
            )
    columns = ("model", "decay", "grid", "… training law held", "held out", "… law held", "γ")
    return View("How the decay depends on μ: total Huber loss", columns, rows)


def _held_out(several: list[ModelStudy]) -> View:
    rows = []
    for one in several:
        for row in one.held_out:
            rows.append(
                (
                    one.design.model,
                    f"{row.mean_loops:g}",
                    f"{row.tokens:.3g}",
                    f"{row.measured:.4f}",
                    _estimate(row.predicted, 4),
                    _percent(row.error),
                    NONE if row.curve_error is None else _percent(row.curve_error),
                    NONE if row.oracle_error is None else _percent(row.oracle_error),
                )
            )
    columns = (
        "model",
        "μ",
        "tokens",
        "measured",
        "predicted",
        "error",
        "over all T",
        "with oracle",
    )
    return View("Runs no law has seen", columns, rows)


def _gaps(study: Study) -> View:
    rows = [
        (gap.looped, f"{gap.transformer} → {gap.larger}", gap.score, f"{gap.share:.1%}")
        for gap in study.gaps
    ]
    columns = ("model", "gap", "score", "closed")
    return View("Share of the gap to the next larger Transformer", columns, rows)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _span(span: tuple[float, float] | None) -> str:
    return NONE if span is None else f"{span[0]:.4g} … {span[1]:.4g}"


def _estimate(value: Estimate | None, digits: int) -> str:
    if value is None:
        return NONE
    if value.low is None or value.high is None:
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} ({value.low:.{digits}f} … {value.high:.{digits}f})"
