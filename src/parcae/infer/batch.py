"""The tokens of one pass through the model, what each of them attends to, and the pass's output.

Tokens of all sequences are concatenated without padding. A `Span` is a run of consecutive tokens of
one row of the cache; a `Batch` is all spans of a pass with their token ids. Keys and values of all
tokens are written before any are read, so tokens of one pass attend to each other causally.

On a CPU attention is computed span by span, as no span then pays for the length of another. On an
accelerator it is one call for all spans, padded to the longest, with a mask: a call for each span
would leave most of it idle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")


class AttentionBatch(Protocol):
    """The tokens of a pass and what each attends to, as the layers of a `TorchNetwork` use them.

    `Batch` is one; others are `static.StaticBatch` and `evaluation.shared_prefix`.
    """

    @property
    def id_tensor(self) -> Tensor:
        """[N]"""
        ...

    @property
    def position_tensor(self) -> Tensor:
        """[N]"""
        ...

    def write_kv(self, kv: Any, k_NKE: Tensor, v_NKE: Tensor) -> None: ...

    def attend(self, q_NHE: Tensor, kv: Any, scale: float | None = None) -> Tensor: ...


class LayerCaches(Protocol):
    """The keys and values of each layer, in the form that an `AttentionBatch` writes and reads."""

    @property
    def prelude_layers(self) -> Sequence[Any]: ...

    @property
    def coda_layers(self) -> Sequence[Any]: ...

    def core_layers(self, loop: int) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Span:
    """`count` consecutive tokens of one cache row, the first at position `first`."""

    row: int
    first: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.first + self.count


class Batch:
    def __init__(self, spans: Sequence[Span], ids: Sequence[int], device: torch.device) -> None:
        self.spans, self.ids, self.device = tuple(spans), ids, device
        if len(ids) != sum(span.count for span in spans):
            raise ValueError(f"{len(ids)} ids, but the spans have other lengths: {spans}")

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.ids)

    @property
    def positions(self) -> list[int]:
        """The position of each token in its sequence."""
        return [position for span in self.spans for position in range(span.first, span.end)]

    @property
    def rows(self) -> list[int]:
        """The cache row of each token."""
        return self.expand([span.row for span in self.spans])

    def expand(self, per_span: Sequence[T]) -> list[T]:
        """One value per token, from one value per span."""
        pairs = zip(per_span, self.spans, strict=True)
        return [value for value, span in pairs for _ in range(span.count)]

    @property
    def id_tensor(self) -> Tensor:
        """[N]"""
        return self._tensors[0]

    @property
    def position_tensor(self) -> Tensor:
        """[N]"""
        return self._tensors[1]

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        """Ids and positions; passes in C++ need neither."""
        return (
            torch.tensor(self.ids, device=self.device),
            torch.tensor(self.positions, device=self.device),
        )

    @cached_property
    def last_indices(self) -> list[int]:
        """The index of each span's last token among all tokens."""
        return [end - 1 for end in accumulate(span.count for span in self.spans)]

    def indices_of(self, spans: Collection[int]) -> list[int]:
        """The indices of the tokens of these spans among all tokens."""
        owners = self.expand(range(len(self.spans)))
        return [index for index, owner in enumerate(owners) if owner in spans]

    def select(self, spans: Sequence[int]) -> Batch:
        """The spans with these indices, in increasing order, as a batch."""
        ids = [self.ids[index] for index in self.indices_of(set(spans))]
        return Batch([self.spans[index] for index in spans], ids, self.device)

    @cached_property
    def _aligned_rows(self) -> range | None:
        return _aligned_rows(self.spans)

    def write_kv(self, kv: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> None:
        """Write the tokens' keys and values into `kv` [row, position, 2, K, E]."""
        if pads_attention(self.device):
            new = torch.stack((k_NKE, v_NKE), 1)
            kv[self._row_tensor, self.position_tensor] = new.to(kv.dtype)
            return
        if self._aligned_rows is not None:
            rows, span = self._aligned_rows, self.spans[0]
            target = kv[rows.start : rows.stop, span.first]
            target[:, 0], target[:, 1] = k_NKE, v_NKE
            return
        start = 0
        for span in self.spans:
            target, end = kv[span.row, span.first : span.end], start + span.count
            target[:, 0], target[:, 1] = k_NKE[start:end], v_NKE[start:end]
            start = end

    def attend(self, q_NHE: Tensor, kv: Tensor, scale: float | None = None) -> Tensor:
        """Attention of each token over its own row, up to its own position: [N, H, E].

        Scores are multiplied by `scale`; the default is 1 / sqrt(E).
        """
        if self._aligned_rows is not None:
            rows = self._aligned_rows
            seen = kv[rows.start : rows.stop, : self.spans[0].end]
            k, v = seen.permute(2, 0, 3, 1, 4).unbind()
            return attention(q_NHE[:, :, None], k, v, None, False, scale)[:, :, 0]
        if pads_attention(self.device):
            k, v = self._seen_rows(kv).permute(2, 0, 3, 1, 4).unbind()
            q = q_NHE[self._padding.tokens].transpose(1, 2)
            y = attention(q, k, v, self._padding.mask, False, scale)
            return y.transpose(1, 2).flatten(0, 1)[self._padding.places]
        outputs, start = [], 0
        for span, mask in zip(self.spans, self._masks, strict=True):
            q = q_NHE[start : start + span.count].transpose(0, 1)
            k, v = kv[span.row : span.row + 1, : span.end].permute(2, 0, 3, 1, 4).unbind()
            causal = span.first == 0 and span.count > 1
            outputs.append(attention(q[None], k, v, mask, causal, scale)[0].transpose(0, 1))
            start += span.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @cached_property
    def _row_tensor(self) -> Tensor:
        """[N]"""
        return torch.tensor(self.rows, device=self.device)

    def _seen_rows(self, kv: Tensor) -> Tensor:
        """The rows of the spans [B, S, 2, K, E], up to the last position that any attends to."""
        rows, end = [span.row for span in self.spans], max(span.end for span in self.spans)
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return kv[rows[0] : rows[0] + len(rows), :end]
        return kv[torch.tensor(rows, device=self.device), :end]

    @cached_property
    def _padding(self) -> _Padding:
        return _Padding.of(self.spans, self.device)

    @cached_property
    def _masks(self) -> list[Tensor | None]:
        return [self._mask(span) for span in self.spans]

    def _mask(self, span: Span) -> Tensor | None:
        if span.count == 1 or span.first == 0:
            return None
        keys = torch.arange(span.end, device=self.device)
        return keys <= keys[span.first :, None]


@dataclass(frozen=True, eq=False)
class _Padding:
    """The tokens of B spans as a table [B, n], n the length of the longest span."""

    tokens: Tensor
    """The index of the token at each place [B, n]; the span's first where there is none."""
    places: Tensor
    """The place of each token in the flattened table [N]."""
    mask: Tensor
    """Which positions each token attends to [B, 1, n, S]."""

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> _Padding:
        counts = torch.tensor([span.count for span in spans])
        firsts = torch.tensor([span.first for span in spans])
        offsets = torch.arange(int(counts.max()))
        valid = offsets < counts[:, None]
        start = counts.cumsum(0) - counts
        tokens = start[:, None] + offsets * valid
        positions = firsts[:, None] + offsets * valid
        keys = torch.arange(int((firsts + counts).max()))
        mask = keys <= positions[:, None, :, None]
        places = valid.flatten().nonzero()[:, 0]
        return cls(tokens.to(device), places.to(device), mask.to(device))


def pads_attention(device: torch.device) -> bool:
    return device.type != "cpu"


@dataclass(frozen=True, eq=False)
class PassOutput:
    logits: Tensor
    """[n, V], of the tokens that were to be predicted from."""
    state: Tensor
    """h after the last loop of each token [N, d_h]."""
    loops: list[int]
    """How many loops each span ran."""

    @property
    def logit_rows(self) -> list[np.ndarray]:
        """The logits as one array per token. In numpy: right after a pass the CPU caches are cold,
        and a PyTorch operator takes longer than finding the maximum."""
        logits = self.logits if self.logits.is_cpu else self.logits.cpu()
        return list(logits.numpy())


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """q [B, H, n, E] over keys and values [B, K, S, E] of any float dtype."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _aligned_rows(spans: Sequence[Span]) -> range | None:
    """The rows, if the spans are single tokens at one position in consecutive rows, so that one
    call of attention serves all of them; else None."""
    if not spans or any(s.count != 1 or s.first != spans[0].first for s in spans):
        return None
    rows = range(spans[0].row, spans[0].row + len(spans))
    return rows if all(s.row == row for s, row in zip(spans, rows, strict=True)) else None
