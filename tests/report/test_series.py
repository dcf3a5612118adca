"""Smoothing and thinning against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from parcae.report.series import column, number, numbers, smooth, thin


@pytest.mark.parametrize("value", [None, "3", True, math.inf, -math.inf, math.nan, 10**400, [1]])
def test_what_is_no_finite_number(value):
    assert math.isnan(number(value))


def test_columns_leave_out_what_is_missing():
    lines = [{"step": 1, "x": 2}, {"step": 2, "x": None}, {"x": 4}, {"step": 3, "x": 5.5}]
    steps, values = column(lines, "x")
    assert steps.tolist() == [1, 3]
    assert values.tolist() == [2, 5.5]
    assert len(column([], "x")[0]) == 0
    assert numbers("123").tolist() == numbers(None).tolist() == []


def test_smooth_is_a_centred_mean():
    values = np.random.default_rng(0).normal(size=50)
    got = smooth(values, 7)
    for i in range(50):
        half = min(3, i)
        assert got[i] == pytest.approx(values[i - half : i + half + 1].mean())
    line = np.linspace(9, 3, 40)
    np.testing.assert_allclose(smooth(line, 9)[:36], line[:36])
    assert len(smooth(np.empty(0), 5)) == 0
    np.testing.assert_allclose(smooth(values, 0), values)


def test_thinning_keeps_ends_and_spikes():
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[31_337], y[77_777] = 50, -50
    thin_x, thin_y = thin(x, y)
    assert len(thin_x) <= 2000
    assert (np.diff(thin_x) > 0).all()
    assert {0, 31_337, 77_777, 99_999} <= set(thin_x.astype(int))
    assert thin_y.max() == 50
    assert thin_y.min() == -50
