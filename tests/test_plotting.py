"""Ticks of figures are few, round and inside the axis; files look like the figure."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from parcae import plotting


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1.3e4, 9e4, ["15k", "20k", "30k", "40k", "50k", "70k"]),
        (1e9, 3e11, ["1B", "3B", "10B", "30B", "100B", "300B"]),
        (2.0, 11.0, ["2", "3", "4", "5", "7", "10"]),
        (0.87, 16.0, ["1", "2", "5", "10"]),
        (1e3, 1e9, ["1k", "10k", "100k", "1M", "10M", "100M", "1B"]),
    ],
)
def test_count_ticks(low: float, high: float, labels: list[str]) -> None:
    with plotting.figure() as (canvas, axes):
        axes.set(yscale="log", ylim=(low, high))
        plotting.count_ticks(axes.yaxis)
        canvas.canvas.draw()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        assert [label.get_text() for tick, label in ticks if low <= tick <= high * 1.001] == labels


def test_a_narrow_axis_still_has_two_ticks() -> None:
    with plotting.figure() as (canvas, axes):
        axes.set(yscale="log", ylim=(2.1e9, 2.6e9))
        plotting.count_ticks(axes.yaxis)
        canvas.canvas.draw()
        assert sum(2.1e9 <= tick <= 2.6e9 for tick in axes.get_yticks()) >= 2


def test_loops_that_are_too_close_get_one_tick() -> None:
    with plotting.figure() as (_, axes):
        axes.plot([1, 2, 8, 9, 16], [5, 4, 3, 2, 1])
        plotting.loop_ticks(axes, [1, 2, 8, 9, 16])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "8", "16"]
        plotting.loop_ticks(axes, [*range(1, 11), 12, 14, 16, 20, 24, 32])
        assert axes.get_xticks().tolist() == [1, 2, 4, 8, 16, 32]


def test_curves_beyond_the_palette_differ_by_their_dashes() -> None:
    looks = {(plotting.colour(index), plotting.dash(index)) for index in range(32)}
    assert len(looks) == 32


def test_pages_have_the_colours_of_figures():
    light = plotting.page_style().split("@media")[0]
    variables = dict(re.findall(r"--(\w+): (#\w+)", light))
    assert tuple(variables[f"c{n}"] for n in range(len(plotting.PALETTE))) == plotting.PALETTE
    assert variables["red"] == plotting.RED


@pytest.mark.slow
def test_a_colour_map_has_no_patches_in_a_png(tmp_path) -> None:
    with plotting.figure() as (canvas, axes):
        canvas.colorbar(axes.imshow(np.linspace(0, 1, 4096).reshape(64, 64)), ax=axes)
        path = plotting.save(canvas, tmp_path / "map.png")
    with Image.open(path) as picture:
        colours = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)
        assert len(colours) > 300
        assert picture.info["dpi"] == pytest.approx((140, 140), abs=0.1)
