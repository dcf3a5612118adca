"""Attention over rows of the cache against softmax by hand, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from parcae.infer.work import Part, Work

CPU = torch.device("cpu")
ROWS, ROOM, HEADS, GROUPS, SIZE = 4, 9, 4, 2, 6


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "parts",
    [
        [Part(0, 0)],
        [Part(2, 5)],
        [Part(1, 0, 5)],
        [Part(1, 3, 4)],
        [Part(0, 4), Part(1, 4), Part(2, 4)],  # lanes: one call for all
        [Part(1, 4), Part(2, 4)],
        [Part(0, 4), Part(2, 4)],  # a gap
        [Part(1, 4), Part(0, 4)],  # out of order
        [Part(0, 4), Part(1, 5)],  # different positions
        [Part(3, 0, 3), Part(0, 8), Part(1, 2, 3)],
    ],
)
@pytest.mark.parametrize("groups", [HEADS, GROUPS])
def test_each_token_sees_its_row_up_to_itself(parts, groups):
    work = Work(parts, [0] * sum(part.count for part in parts), CPU)
    kept = draw(ROWS, ROOM, 2, groups, SIZE)
    q, k, v = (
        draw(work.tokens, HEADS, SIZE),
        *(draw(work.tokens, groups, SIZE + i)[..., :SIZE] for i in (1, 2)),
    )
    expected_kept = kept.clone()
    places = [(part.row, at) for part in parts for at in range(part.first, part.end)]
    for n, (row, at) in enumerate(places):
        expected_kept[row, at, 0], expected_kept[row, at, 1] = k[n], v[n]
    work.write(kept, k, v)
    assert torch.equal(kept, expected_kept)
    assert list(zip(work.rows, work.positions, strict=True)) == places

    found = work.attend(q, kept)
    for n, (row, at) in enumerate(places):
        for head in range(HEADS):
            keys, values = expected_kept[row, : at + 1, :, head // (HEADS // groups)].unbind(1)
            weights = (keys @ q[n, head] / math.sqrt(SIZE)).softmax(-1)
            torch.testing.assert_close(found[n, head], weights @ values, atol=1e-5, rtol=1e-5)


def test_last_tokens_and_selections():
    work = Work([Part(3, 0, 3), Part(0, 8), Part(1, 2, 3)], [1, 2, 3, 4, 5, 6, 7], CPU)
    assert work.last_tokens == [2, 3, 6]
    some = work.only([0, 2])
    assert some.parts == (Part(3, 0, 3), Part(1, 2, 3))
    assert (some.tokens, some.ids) == (6, [1, 2, 3, 5, 6, 7])
    assert work.tokens_of({1, 2}) == [3, 4, 5, 6]
    assert work.each("abc") == ["a", "a", "a", "b", "c", "c", "c"]
    with pytest.raises(ValueError, match="6 ids"):
        Work(work.parts, [0] * 6, CPU)
