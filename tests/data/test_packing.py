"""Packing against a plain list that is scanned from front to back."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parcae.config import ConfigError
from parcae.data.packing import Packing, concatenate, pack


def list_best_fit(lengths, capacity, buffer):
    """The oracle. Rows of (document, start, length), cropped tokens, tokens left over."""
    stream = list(enumerate(lengths))
    waiting, rows, cropped = [], [], 0
    row, remaining = [], capacity
    while True:
        while stream and len(waiting) < buffer:
            waiting.append(stream.pop(0))
        if not waiting:
            return rows, cropped, capacity - remaining
        best = None
        for i, (_, length) in enumerate(waiting):
            if length <= remaining and (best is None or length > waiting[best][1]):
                best = i
        if best is None:
            best = 0
            for i, (_, length) in enumerate(waiting):
                if length < waiting[best][1]:
                    best = i
        document, length = waiting.pop(best)
        row.append((document, 0, min(length, remaining)))
        cropped += max(0, length - remaining)
        remaining -= min(length, remaining)
        if remaining == 0:
            rows.append(row)
            row, remaining = [], capacity


def list_concatenation(lengths, capacity):
    flat = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    rows = len(flat) // capacity
    return [flat[r * capacity : (r + 1) * capacity] for r in range(rows)], len(flat) % capacity


def rows_of(packing: Packing) -> list[list[tuple[int, int, int]]]:
    return [[tuple(segment) for segment in packing.row(r)] for r in range(packing.rows)]


@st.composite
def problems(draw):
    """Few distinct lengths make ties; the row's size and its neighbours are always among them."""
    capacity = draw(st.integers(1, 40))
    special = st.sampled_from([1, max(1, capacity - 1), capacity, capacity + 1, 3 * capacity])
    common = st.sampled_from(draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
    any_length = st.integers(1, 2 * capacity + 5)
    lengths = draw(st.lists(st.one_of(special, common, any_length), max_size=80))
    return lengths, capacity, draw(st.integers(1, 30))


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(problems())
@example(([], 4, 2))
@example(([1, 1, 1], 4, 2))
@example(([9, 9, 9, 5, 5, 4, 4, 1], 4, 3))
def test_best_fit_is_the_list_scan(problem):
    lengths, capacity, buffer = problem
    rows, cropped, leftover = list_best_fit(lengths, capacity, buffer)
    packing = pack(np.array(lengths, dtype=np.int64), capacity, buffer)
    assert rows_of(packing) == rows
    assert (packing.cropped_tokens, packing.leftover_tokens) == (cropped, leftover)


@pytest.mark.slow
def test_best_fit_is_the_list_scan_on_many_random_blocks():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        capacity, buffer = int(rng.integers(1, 60)), int(rng.integers(1, 40))
        lengths = rng.integers(1, rng.integers(2, 2 * capacity + 3), rng.integers(0, 60))
        rows, cropped, leftover = list_best_fit(lengths.tolist(), capacity, buffer)
        packing = pack(lengths, capacity, buffer)
        assert rows_of(packing) == rows
        assert (packing.cropped_tokens, packing.leftover_tokens) == (cropped, leftover)


@pytest.mark.slow
def test_best_fit_is_the_list_scan_at_full_size():
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(5.5, 1.2, 6_000)).astype(np.int64)
    rows, cropped, leftover = list_best_fit(lengths.tolist(), 513, 1_000)
    packing = pack(lengths, 513, 1_000)
    assert rows_of(packing) == rows
    assert (packing.cropped_tokens, packing.leftover_tokens) == (cropped, leftover)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(problems())
@example(([], 4, 2))
@example(([4, 4], 4, 2))
def test_concatenation_is_the_flat_list(problem):
    lengths, capacity, _ = problem
    rows, leftover = list_concatenation(lengths, capacity)
    packing = concatenate(np.array(lengths, dtype=np.int64), capacity)
    flat = [[(d, s + i) for d, s, n in row for i in range(n)] for row in rows_of(packing)]
    assert flat == rows
    assert (packing.cropped_tokens, packing.leftover_tokens) == (0, leftover)
    assert packing.aligned_rows == sum(row[0][1] == 0 for row in rows)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from(["best-fit", "concatenate"]))
def test_every_token_is_accounted_for_and_every_row_is_full(problem, method):
    lengths, capacity, buffer = problem
    packing = pack(np.array(lengths, dtype=np.int64), capacity, buffer, method)
    assert packing.all_tokens == sum(lengths)
    assert packing.packed_tokens == packing.rows * capacity
    assert packing.utilisation == 1.0
    assert all(sum(n for _, _, n in row) == capacity for row in rows_of(packing))
    if method == "best-fit":
        assert packing.aligned_rows == packing.rows
        assert len(set(packing.documents.tolist())) == len(packing.documents)
        assert packing.leftover_tokens < capacity


def test_ties_go_to_the_first():
    packing = pack(np.array([3, 2, 3, 2, 3, 2]), capacity=5, buffer=6)
    assert rows_of(packing) == [
        [(0, 0, 3), (1, 0, 2)],
        [(2, 0, 3), (3, 0, 2)],
        [(4, 0, 3), (5, 0, 2)],
    ]


def test_the_shortest_is_cropped_when_none_fits():
    packing = pack(np.array([8, 5, 7, 5]), capacity=8, buffer=4)
    assert rows_of(packing) == [[(0, 0, 8)], [(2, 0, 7), (1, 0, 1)]]
    assert (packing.cropped_tokens, packing.leftover_tokens) == (4, 5)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="capacity"):
        pack(np.array([1]), 0)
    with pytest.raises(ConfigError, match="buffer"):
        pack(np.array([1]), 2, 0)
    with pytest.raises(ConfigError, match="no tokens"):
        pack(np.array([1, 0]), 2)
