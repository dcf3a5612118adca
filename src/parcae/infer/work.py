"""Which tokens a pass computes, and what each of them attends to.

Tokens of all sequences lie end to end. A `Part` is the run of tokens that belongs to one row of the
cache; a `Work` is all parts of a pass with the ids of their tokens. Every token is written before
anything is read, so tokens of one pass see each other as far as causality lets them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """`count` consecutive tokens of one row, the first at position `first`."""

    row: int
    first: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.first + self.count


class Work:
    def __init__(self, parts: Sequence[Part], ids: Sequence[int], device: torch.device) -> None:
        self.parts, self.ids, self.device = tuple(parts), ids, device
        self.tokens = len(ids)
        if self.tokens != sum(part.count for part in parts):
            raise ValueError(f"{self.tokens} ids for parts of other sizes: {parts}")

    @property
    def positions(self) -> list[int]:
        return [place for part in self.parts for place in range(part.first, part.end)]

    @property
    def rows(self) -> list[int]:
        return self.each([part.row for part in self.parts])

    def each(self, of_parts: Sequence[T]) -> list[T]:
        """What is said of parts, said of their tokens."""
        pairs = zip(of_parts, self.parts, strict=True)
        return [value for value, part in pairs for _ in range(part.count)]

    @cached_property
    def id_tensor(self) -> Tensor:
        """[N]"""
        return torch.tensor(self.ids, device=self.device)

    @cached_property
    def position_tensor(self) -> Tensor:
        """[N]"""
        return torch.tensor(self.positions, device=self.device)

    @cached_property
    def last_tokens(self) -> list[int]:
        """Where each part's last token stands among all tokens."""
        return [end - 1 for end in accumulate(part.count for part in self.parts)]

    def tokens_of(self, parts: Collection[int]) -> list[int]:
        """Places of these parts' tokens among all tokens."""
        owners = self.each(range(len(self.parts)))
        return [place for place, owner in enumerate(owners) if owner in parts]

    def only(self, kept: Sequence[int]) -> Work:
        """The parts with these indices, which rise."""
        ids = [self.ids[place] for place in self.tokens_of(set(kept))]
        return Work([self.parts[index] for index in kept], ids, self.device)

    @cached_property
    def _lanes(self) -> range | None:
        return _equal_lanes(self.parts)

    def write(self, kept: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> None:
        """`kept` [row, position, 2, K, E] receives the tokens' keys and values."""
        if self._lanes is not None:
            rows, part = self._lanes, self.parts[0]
            target = kept[rows.start : rows.stop, part.first]
            target[:, 0], target[:, 1] = k_NKE, v_NKE
            return
        start = 0
        for part in self.parts:
            target, end = kept[part.row, part.first : part.end], start + part.count
            target[:, 0], target[:, 1] = k_NKE[start:end], v_NKE[start:end]
            start = end

    def attend(self, q_NHE: Tensor, kept: Tensor, scale: float | None = None) -> Tensor:
        """[N, H, E]: each token over its own row, up to and with its own position.

        Scores are multiplied by `scale`, 1 / sqrt(E) if left out.
        """
        if self._lanes is not None:
            rows = self._lanes
            seen = kept[rows.start : rows.stop, : self.parts[0].end]
            k, v = seen.permute(2, 0, 3, 1, 4).unbind()
            return _attend(q_NHE[:, :, None], k, v, None, False, scale)[:, :, 0]
        outputs, start = [], 0
        for part, mask in zip(self.parts, self._masks, strict=True):
            q = q_NHE[start : start + part.count].transpose(0, 1)
            k, v = kept[part.row : part.row + 1, : part.end].permute(2, 0, 3, 1, 4).unbind()
            causal = part.first == 0 and part.count > 1
            outputs.append(_attend(q[None], k, v, mask, causal, scale)[0].transpose(0, 1))
            start += part.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @cached_property
    def _masks(self) -> list[Tensor | None]:
        return [self._mask(part) for part in self.parts]

    def _mask(self, part: Part) -> Tensor | None:
        if part.count == 1 or part.first == 0:
            return None
        keys = torch.arange(part.end, device=self.device)
        return keys <= keys[part.first :, None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """q [B, H, n, E] over keys and values [B, K, S, E]."""
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _equal_lanes(parts: Sequence[Part]) -> range | None:
    """The rows, where single tokens at one position fill consecutive rows: one call serves all."""
    if not parts or any(p.count != 1 or p.first != parts[0].first for p in parts):
        return None
    rows = range(parts[0].row, parts[0].row + len(parts))
    return rows if all(p.row == row for p, row in zip(parts, rows, strict=True)) else None
