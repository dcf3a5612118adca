"""The figures of a fit, as in the paper's scaling sections, as PNG and SVG.

isoloss      contours of the training law over loops and tokens, with the efficient frontier
isoflop      a parabola for each FLOP budget
power-laws   optimal loops and tokens against FLOPs
frontier     the best looping compared with fixed depth
test-time    loss against T by training depth, with exponential fits
saturation   loss against T of the held-out models, all sizes
unified      the unified law on those, alone and given the loss at T = mu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parcae import plotting
from parcae.console import format_count, format_flops
from parcae.laws.bootstrap import LawResult
from parcae.laws.fit import FitResult, ModelFit
from parcae.laws.isoflop import frontier, optimum
from parcae.laws.loop_curves import CurveFit, oracle_curve
from parcae.laws.model_runs import Points
from parcae.plotting import BLUE, GREY, ORANGE

Painter = Callable[[Any, ModelFit], None]


def draw_all(result: FitResult, out: str | Path) -> list[str]:
    """Draw all figures that the fit has data for; returns the names of the PNG files."""
    out = Path(out)
    written = []
    for name, (has_data, paint) in FIGURES.items():
        chosen = [model for model in result.models.values() if has_data(model)]
        if chosen:
            with plotting.figure(1, len(chosen), width=4.6, height=3.7) as (canvas, axes):
                for model, panel in zip(chosen, np.atleast_1d(axes), strict=True):
                    panel.set_title(model.model, parse_math=False)
                    paint(panel, model)
                written.append(_save(canvas, out, name))
    if any(model.power_laws or model.parabolas for model in result.models.values()):
        written.append(_power_laws(result, out))
    if with_curve := [model for model in result.models.values() if held_out_curve(model)]:
        written.append(_saturation(with_curve, out))
    return written


def _save(canvas: Any, out: Path, name: str) -> str:
    plotting.save(canvas, out / f"{name}.svg")
    plotting.save(canvas, out / f"{name}.png")
    return f"{name}.png"


def _isoloss(axes: Any, model: ModelFit) -> None:
    law, cost = model.laws["training"], model.cost
    runs = model.runs.points.take(model.runs.training())
    loops = np.geomspace(runs.mean_loops.min() / 1.3, runs.mean_loops.max() * 1.6, 120)
    tokens = np.geomspace(runs.tokens.min() / 1.6, runs.tokens.max() * 1.6, 120)
    grid = np.meshgrid(loops, tokens)
    losses = law.law.predict(law.values, cost.points_at(*grid)).reshape(grid[0].shape)
    levels = np.linspace(losses.min(), np.quantile(losses, 0.97), 12)
    axes.contour(*grid, losses, levels=levels, cmap="viridis_r", linewidths=1.2)
    _label_contours(axes, levels[1::2], (loops, tokens, losses))
    low = float(cost.smooth_flops_per_token(loops[0]) * tokens[0]) / 2
    high = float(cost.smooth_flops_per_token(loops[-1]) * tokens[-1]) * 2
    budgets = np.geomspace(low, high, 80)
    best = np.array([frontier(law.values, cost, flops)[0][0] for flops in budgets])
    axes.plot(
        best, budgets / cost.smooth_flops_per_token(best), color=BLUE, label="efficient frontier"
    )
    axes.plot(runs.mean_loops, runs.tokens, "o", color=GREY, markersize=3, label="runs")
    axes.set(xscale="log", yscale="log", xlabel="mean loops μ", ylabel="tokens D")
    axes.set(xlim=(loops[0], loops[-1]), ylim=(tokens[0], tokens[-1]))
    plotting.value_ticks(axes.xaxis, np.unique(runs.mean_loops))
    plotting.count_ticks(axes.yaxis)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8.5)


def _label_contours(
    axes: Any, levels: np.ndarray, grid: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Label the contours to the right of the runs, so that no label hides a run."""
    loops, tokens, losses = grid
    column = np.searchsorted(loops, loops[-1] / 1.25)
    falling = losses[:, column]
    shown = [level for level in levels if falling[-1] < level < falling[0]]
    heights = np.interp(shown, falling[::-1], np.log(tokens[::-1]))
    for height, level in zip(heights, shown, strict=True):
        axes.text(
            loops[column],
            float(np.exp(height)),
            f"{level:.2f}",
            fontsize=8,
            ha="center",
            va="center",
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )


def _isoflop(axes: Any, model: ModelFit) -> None:
    rows = model.runs.training()
    points, budget = model.runs.points.take(rows), model.runs.budget[rows]
    colors = plotting.shades(len(model.parabolas["loops"]))
    for parabola, color in zip(model.parabolas["loops"], colors, strict=True):
        here = budget == parabola.budget
        where = np.geomspace(parabola.low / 1.1, parabola.high * 1.1, 100)
        axes.plot(where, parabola.loss(where), color=color, linewidth=1.5)
        label = format_flops(parabola.budget)
        axes.plot(points.mean_loops[here], points.loss[here], "o", color=color, label=label)
        if parabola.is_inside:
            best = parabola.optimum
            axes.plot(best, parabola.loss(best), "*", color=color, markersize=11, zorder=5)
    axes.set(xscale="log", xlabel="mean loops μ", ylabel="validation loss")
    plotting.value_ticks(axes.xaxis, np.unique(points.mean_loops))
    _legend_right(axes, "FLOPs")


def _frontier(axes: Any, model: ModelFit) -> None:
    budgets = np.array([row.budget for row in model.fixed_depth])
    law = model.laws["training"]
    wide = np.geomspace(budgets.min() / 1.5, budgets.max() * 1.5, 60)
    losses = [_optimal_loss(law, model, flops) for flops in wide]
    middle, low, high = (np.array(part) for part in zip(*losses, strict=True))
    axes.plot(wide, middle, color=BLUE, label="law at its optimal μ")
    axes.fill_between(wide, low, high, color=BLUE, alpha=0.18, linewidth=0)
    best = [row.best_loss for row in model.fixed_depth]
    axes.plot(budgets, best, "o", color=BLUE, label="best looped run")
    fixed = [
        (row.budget, row.fixed_loss) for row in model.fixed_depth if row.fixed_loss is not None
    ]
    if fixed:
        axes.plot(
            *zip(*fixed, strict=True), "s--", color=ORANGE, linewidth=1.3, label="fixed depth"
        )
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss")
    plotting.flop_ticks(axes.xaxis, budgets)
    axes.legend(loc="upper right", fontsize=8.5)


def _optimal_loss(law: LawResult, model: ModelFit, flops: float) -> tuple[float, float, float]:
    """The loss at the optimal mu, and its interval."""
    loss = optimum(law, model.cost, flops).loss
    if loss.low is None or loss.high is None:
        return loss.value, loss.value, loss.value
    return loss.value, loss.low, loss.high


def _test_time(axes: Any, model: ModelFit) -> None:
    chosen = _curves_of_same_tokens(model)
    colors = plotting.shades(len(chosen))
    for fit, color in zip(chosen, colors, strict=True):
        curve = fit.curve
        where = np.linspace(curve.test_loops.min(), curve.test_loops.max(), 200)
        label = f"{curve.mean_loops[0]:g}, {format_count(curve.tokens[0])}"
        axes.plot(where, fit.predict(where), color=color, linewidth=1.4)
        axes.plot(curve.test_loops, curve.loss, "o", color=color, markersize=3, label=label)
    axes.set(xlabel="loops at test time T", ylabel="validation loss")
    _legend_right(axes, "μ, tokens")


def _curves_of_same_tokens(model: ModelFit) -> list[CurveFit]:
    """One curve per depth, of the number of tokens that has the most depths.

    Of the runs trained for curves if there are any.
    """
    by_set = model.test_time.fits if model.test_time else {}
    fits = by_set.get("curve") or [fit for listed in by_set.values() for fit in listed]
    by_tokens: dict[float, list[CurveFit]] = {}
    for fit in fits:
        by_tokens.setdefault(float(fit.curve.tokens[0]), []).append(fit)
    if not fits:
        return []
    same = max(by_tokens.values(), key=lambda part: len({f.curve.mean_loops[0] for f in part}))
    listed = same if len(same) > 1 else fits
    chosen: dict[float, CurveFit] = {}
    for fit in sorted(listed, key=lambda f: -len(f.curve)):
        chosen.setdefault(float(fit.curve.mean_loops[0]), fit)
    return [chosen[loops] for loops in sorted(chosen)]


def _unified(axes: Any, model: ModelFit) -> None:
    law, curve = model.laws["unified"], held_out_curve(model)
    assert curve is not None
    where = np.linspace(1, curve.test_loops.max(), 200)
    at = model.cost.points_at(curve.mean_loops[0], curve.tokens[0] * np.ones_like(where), where)
    axes.plot(where, law.law.predict(law.values, at), color=ORANGE, label="unified law")
    at_mu = curve.test_loops == np.round(curve.mean_loops)
    if at_mu.any():
        oracle = oracle_curve(law, float(curve.loss[at_mu][0]), at)
        axes.plot(where, oracle, "--", color=BLUE, label="given the loss at T = μ")
    axes.plot(curve.test_loops, curve.loss, "o", color="black", markersize=4, label="measured")
    axes.set(xlabel="loops at test time T", ylabel="validation loss")
    axes.legend(loc="upper right", fontsize=8.5)
    text = f"μ = {curve.mean_loops[0]:g}, {format_count(curve.tokens[0])} tokens"
    axes.text(0.98, 0.6, text, transform=axes.transAxes, ha="right", fontsize=8.5, color=GREY)


def held_out_curve(model: ModelFit) -> Points | None:
    """The end-to-end model with the most tokens; without one, the held-out run with the most."""
    runs = model.runs
    listed = runs.curves(runs.held_out() & runs.in_set("end-to-end"), 4)
    listed = listed or runs.curves(runs.held_out(), 4)
    if not listed:
        return None
    return max(listed, key=lambda curve: (curve.tokens[0], curve.run[0]))


def _saturation(models: Sequence[ModelFit], out: Path) -> str:
    with plotting.figure(width=5.4, height=3.7) as (canvas, axes):
        for model, color in zip(models, plotting.shades(len(models)), strict=True):
            curve = held_out_curve(model)
            assert curve is not None
            axes.plot(
                curve.test_loops,
                curve.loss,
                "o-",
                color=color,
                linewidth=1.4,
                label=plotting.literal(model.model),
            )
        axes.set(title="Held-out models", xlabel="loops at test time T", ylabel="validation loss")
        axes.legend(loc="upper right", fontsize=8.5)
        return _save(canvas, out, "saturation")


def _power_laws(result: FitResult, out: Path) -> str:
    chosen = [model for model in result.models.values() if model.parabolas]
    with plotting.figure(len(chosen), 2, width=4.6, height=3.2) as (canvas, axes):
        for model, pair in zip(chosen, np.atleast_2d(axes), strict=True):
            names = (("loops", "optimal loops μ*"), ("tokens", "optimal tokens D*"))
            for panel, (name, text) in zip(pair, names, strict=True):
                panel.set_title(model.model, parse_math=False)
                panel.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel=text)
                _power_law(panel, model, name)
        return _save(canvas, out, "power-laws")


def _power_law(axes: Any, model: ModelFit, name: str) -> None:
    inside = [(p.budget, p.optimum) for p in model.parabolas.get(name, []) if p.is_inside]
    budgets = [p.budget for p in model.parabolas.get(name, [])]
    if inside:
        axes.plot(*zip(*inside, strict=True), "o", color=BLUE, label="parabolas")
    if name in model.power_laws:
        law = model.power_laws[name]
        ends = np.array([min(budgets), max(budgets)])
        text = f"∝ C^{law.exponent:.2f}"
        axes.plot(ends, law(ends), color=BLUE, linewidth=1.4, label=text)
    if "training" in model.laws and budgets:
        wide = np.geomspace(min(budgets), max(budgets), 40)
        cost = model.cost
        best = np.array([frontier(model.laws["training"].values, cost, c)[0][0] for c in wide])
        drawn = best if name == "loops" else wide / cost.smooth_flops_per_token(best)
        axes.plot(wide, drawn, "--", color=ORANGE, linewidth=1.4, label="training law")
    plotting.flop_ticks(axes.xaxis, budgets)
    drawn = np.concatenate([line.get_ydata() for line in axes.get_lines()] or [np.ones(1)])
    low, high = drawn.min() / 1.15, drawn.max() * 1.15
    axes.set_ylim(low, high * (high / low) ** 0.35)  # room for the legend
    plotting.count_ticks(axes.yaxis)
    axes.legend(loc="upper left", fontsize=8.5, ncols=1)


def _legend_right(axes: Any, title: str) -> None:
    axes.legend(
        title=title, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5, title_fontsize=8.5
    )


FIGURES: dict[str, tuple[Callable[[ModelFit], bool], Painter]] = {
    "isoloss": (lambda model: "training" in model.laws, _isoloss),
    "isoflop": (lambda model: "loops" in model.parabolas, _isoflop),
    "frontier": (lambda model: bool(model.fixed_depth) and "training" in model.laws, _frontier),
    "test-time": (lambda model: len(_curves_of_same_tokens(model)) > 1, _test_time),
    "unified": (
        lambda model: "unified" in model.laws and held_out_curve(model) is not None,
        _unified,
    ),
}
"""By name: which models have the data for it, and the function that draws it."""
