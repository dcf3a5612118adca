"""Loss, perplexity and bits per byte after every number of loops asked for.

    measured = losses_by_depth(model, batches, depths=(1, 4, 8), bytes_of_token=table)
    measured[8].loss, measured[8].perplexity, measured[8].bits_per_byte

A batch goes through the prelude once and loops to the deepest depth; only the depths asked for
are decoded. Several processes add what they counted before anything is divided:

    mine = totals_by_depth(model, my_batches, depths, table)
    dist.all_reduce(mine.counts)             # [nats at each depth ..., tokens, bytes], float64, CPU
    mine.finish()

Nothing here turns a model's mode, so a compiled model is not compiled again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parcae.config import require
from parcae.model.depth import check_depth
from parcae.model.frame import IGNORED_TARGET, LanguageModel


@dataclass(frozen=True)
class Loss:
    """What a model is worth at one depth."""

    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float | None
    """None where no table of bytes was given, or the targets stand for no bytes."""


DepthLosses = dict[int, Loss]


@dataclass(frozen=True, eq=False)
class Totals:
    """Sums over tokens, kept apart until the end so that they can be added."""

    depths: tuple[int, ...]
    counts: Tensor
    """[nats at each depth ..., tokens, bytes] in float64; bytes are NaN where they are unknown."""

    @property
    def tokens(self) -> int:
        return int(self.counts[-2])

    def __add__(self, other: Totals) -> Totals:
        if self.depths != other.depths:
            raise ValueError(f"totals at depths {self.depths} and {other.depths} do not add up.")
        return Totals(self.depths, self.counts + other.counts)

    def finish(self) -> DepthLosses:
        *nats, tokens, size = self.counts.tolist()
        require(
            tokens > 0,
            "batches",
            "there is no token to measure the loss on",
            "Give at least one batch with a target that is not ignored.",
        )
        return {d: _finish(n, tokens, size) for d, n in zip(self.depths, nats, strict=True)}


def losses_by_depth(
    model: LanguageModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    depths: Sequence[int],
    bytes_of_token: Tensor | None = None,
    state: Literal["zero", "like-init"] = "zero",
    device: str | torch.device | None = None,
    generator: torch.Generator | None = None,
) -> DepthLosses:
    """The mean over all targets of all batches, at each of `depths`, in their ascending order.

    `batches`: (inputs, targets) [rows, positions]; targets of -100 do not count.
    `bytes_of_token`: how many bytes of text each id stands for.
    `device`: where batches go; that of the model if left out.
    A Transformer has no loop and is measured at depth 1.
    """
    return totals_by_depth(
        model, batches, depths, bytes_of_token, state, device, generator
    ).finish()


@torch.no_grad()
def totals_by_depth(
    model: LanguageModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    depths: Sequence[int],
    bytes_of_token: Tensor | None = None,
    state: Literal["zero", "like-init"] = "zero",
    device: str | torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Totals:
    """One process's share; it may be empty. See `losses_by_depth`."""
    wanted = tuple(sorted({check_depth(depth) for depth in depths}))
    require(len(wanted) > 0, "depths", "there is none", "Name at least one number of loops.")
    device = model.device if device is None else torch.device(device)
    table = None if bytes_of_token is None else bytes_of_token.to(device)
    counts = torch.zeros(len(wanted) + 2, dtype=torch.float64)
    if table is None:
        counts[-1] = torch.nan
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        model.check(inputs, targets)
        tokens = (targets != IGNORED_TARGET).sum()
        counts[-2] += int(tokens)
        if table is not None:
            counts[-1] += _count_bytes(targets, table)
        for place, (_, x) in enumerate(model.readings(inputs, wanted, state, generator)):
            if tokens > 0:
                counts[place] += model.loss(x, targets).item() * int(tokens)
    return Totals(wanted, counts)


def _count_bytes(targets: Tensor, table: Tensor) -> Tensor:
    ids = targets[targets != IGNORED_TARGET].long()
    if ids.numel() and int(ids.max()) >= len(table):
        raise ValueError(
            f"bytes_of_token: {len(table)} entries, but a target has id {int(ids.max())}. "
            "Is it the table of another tokenizer?"
        )
    return table[ids].sum().cpu()


def _finish(nats: float, tokens: float, size: float) -> Loss:
    loss = nats / tokens
    known = not math.isnan(size) and size > 0
    return Loss(
        loss=loss,
        perplexity=math.exp(loss) if not loss > 700 else math.inf,
        bits_per_byte=nats / math.log(2) / size if known else None,
    )
