"""The figure of the demo states what it shows."""

from __future__ import annotations

import pytest

from parcae.report import loop_figure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "trend"), [(2.5, "falls, then saturates"), (3.5, "does not fall: train longer")]
)
def test_the_title_follows_the_curve(last, trend, tmp_path, monkeypatch):
    titles = []

    def record(canvas, path):
        titles.extend(axes.get_title(loc="left") for axes in canvas.axes)
        return path

    monkeypatch.setattr(loop_figure.plotting, "save", record)
    depths = len(loop_figure.DEPTHS)
    profile = loop_figure.Profile([3.0, *[last] * (depths - 1)], [1.0] * depths, [1.0] * depths)
    accuracy = {1: {1: 1.0, 2: 0.5}, 2: {1: 1.0, 2: 0.9}}
    loop_figure.draw_figure(profile, 8, accuracy, tmp_path / "loop_figure.png")
    assert f"Loss on text {trend}" in titles
