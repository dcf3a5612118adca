"""Attention over rows of the cache against softmax by hand, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from parcae.infer import batch as batch_module
from parcae.infer.batch import Batch, Span

CPU = torch.device("cpu")
ROWS, ROOM, HEADS, GROUPS, SIZE = 4, 9, 4, 2, 6


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 0)],
        [Span(2, 5)],
        [Span(1, 0, 5)],
        [Span(1, 3, 4)],
        [Span(0, 4), Span(1, 4), Span(2, 4)],  # aligned rows: one call for all
        [Span(1, 4), Span(2, 4)],
        [Span(0, 4), Span(2, 4)],  # a gap
        [Span(1, 4), Span(0, 4)],  # out of order
        [Span(0, 4), Span(1, 5)],  # different positions
        [Span(3, 0, 3), Span(0, 8), Span(1, 2, 3)],
    ],
)
@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize("padded", [False, True])
def test_each_token_sees_its_row_up_to_itself(spans, groups, padded, monkeypatch):
    """Span by span, and in one call with padding, as on an accelerator."""
    monkeypatch.setattr(batch_module, "pads_attention", lambda device: padded)
    batch = Batch(spans, [0] * sum(span.count for span in spans), CPU)
    kv = draw(ROWS, ROOM, 2, groups, SIZE)
    q, k, v = (
        draw(len(batch), HEADS, SIZE),
        *(draw(len(batch), groups, SIZE + i)[..., :SIZE] for i in (1, 2)),
    )
    expected_kv = kv.clone()
    cells = [(span.row, at) for span in spans for at in range(span.first, span.end)]
    for n, (row, at) in enumerate(cells):
        expected_kv[row, at, 0], expected_kv[row, at, 1] = k[n], v[n]
    batch.write_kv(kv, k, v)
    assert torch.equal(kv, expected_kv)
    assert list(zip(batch.rows, batch.positions, strict=True)) == cells

    output = batch.attend(q, kv)
    for n, (row, at) in enumerate(cells):
        for head in range(HEADS):
            keys, values = expected_kv[row, : at + 1, :, head // (HEADS // groups)].unbind(1)
            weights = (keys @ q[n, head] / math.sqrt(SIZE)).softmax(-1)
            torch.testing.assert_close(output[n, head], weights @ values, atol=1e-5, rtol=1e-5)


def test_last_tokens_and_selections():
    batch = Batch([Span(3, 0, 3), Span(0, 8), Span(1, 2, 3)], [1, 2, 3, 4, 5, 6, 7], CPU)
    assert batch.last_indices == [2, 3, 6]
    some = batch.select([0, 2])
    assert some.spans == (Span(3, 0, 3), Span(1, 2, 3))
    assert (len(some), some.ids) == (6, [1, 2, 3, 5, 6, 7])
    assert batch.indices_of({1, 2}) == [3, 4, 5, 6]
    assert batch.expand("abc") == ["a", "a", "a", "b", "c", "c", "c"]
    with pytest.raises(ValueError, match="6 ids"):
        Batch(batch.spans, [0] * 6, CPU)
