"""The figure of the demo states what it shows."""

from __future__ import annotations

import pytest

from parcae.report import loop_figure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "trend"), [(2.5, "falls, then saturates"), (3.5, "does not fall: train longer")]
)
def test_the_title_follows_the_curve(last, trend, tmp_path, monkeypatch):
    titles, texts = [], []

    def record(canvas, path):
        for axes in canvas.axes:
            titles.append(axes.get_title(loc="left"))
            texts.append({text.get_text(): text.get_position() for text in axes.texts})
            assert axes.get_legend() is None, "lines are labelled themselves"
        return path

    monkeypatch.setattr(loop_figure.plotting, "save", record)
    depths = len(loop_figure.DEPTHS)
    profile = loop_figure.Profile([3.0, *[last] * (depths - 1)], [1.0] * depths, [1.0] * depths)
    accuracy = {1: {1: 1.0, 2: 0.5}, 2: {1: 1.0, 2: 0.9}, 3: {1: 1.0, 2: 0.96}}
    loop_figure.draw_figure(profile, 8, accuracy, tmp_path / "loop_figure.png")
    assert f"Loss on text {trend}" in titles
    left, middle, right = texts
    assert (left["1"][0], left["2"][0]) == (1, 3), "at the first depth that solves a length"
    assert "3.00 nats per token" in middle
    assert len(right) == 3


def test_only_the_diagonal_injection_is_bounded():
    """Within the axis: a reader would otherwise believe the lowest line."""
    growth = {n: loop_figure.linear_growth(n) for n in ("diagonal", "addition", "concatenation")}
    assert growth["diagonal"][-1] == pytest.approx(growth["diagonal"][-20], rel=1e-3)
    assert growth["concatenation"][-1] > 10 * growth["addition"][-1] > 100 * growth["diagonal"][-1]
