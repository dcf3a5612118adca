"""Panels of the report: smoothing, thinning, legends."""

from __future__ import annotations

import numpy as np
import pytest

from parcae.report.panel import smooth, thin


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
