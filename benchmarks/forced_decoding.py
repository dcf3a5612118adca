"""Loss of a model in decoding: token by token over a cache, with early exit or shared slots.

Rows of held-out text are forced through the passes of the engine: the first tokens are read as a
prompt, each further one is decoded, and its prediction is scored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import require
from parcae.infer.batch import Batch, Span
from parcae.infer.cache import Cache, CacheDType, Policy
from parcae.infer.layers import without_autocast
from parcae.infer.network import Network
from parcae.infer.request import DepthPlan


@dataclass(frozen=True, eq=False)
class Decoded:
    """The result of decoding some rows."""

    nats: Tensor
    """Loss of each decoded position [rows, positions]."""
    loops: Tensor
    """Loops of each decoded position [rows, positions]."""
    seconds: float
    """Time of decoding, without the prompts."""

    @property
    def loss(self) -> float:
        return self.nats.double().mean().item()

    @property
    def mean_loops(self) -> float:
        return self.loops.double().mean().item()


def decode_forced(
    network: Network,
    rows: Tensor,
    plan: DepthPlan,
    policy: Policy | str = "full",
    prompt: int = 16,
    on_step: Callable[[], None] | None = None,
    cache_dtype: CacheDType | None = None,
) -> Decoded:
    """Decode `rows` of token ids [B, S] together; the last token is only predicted."""
    length = rows.shape[1]
    valid = 0 < prompt < length - 1
    require(valid, "prompt", f"{prompt} of {length} tokens", "Leave two to decode and predict.")
    limit = network.model.layout.context_length
    require(length <= limit + 1, "rows", f"{length} tokens do not fit in {limit}", "Shorten them.")
    with without_autocast(network.model.device):
        cache = network.model.cache(policy, dtype=cache_dtype)
        return _decode(network, cache, rows, plan, prompt, on_step)


def _decode(
    network: Network,
    cache: Cache,
    rows: Tensor,
    plan: DepthPlan,
    prompt: int,
    on_step: Callable[[], None] | None,
) -> Decoded:
    count, length = rows.shape
    cache.reserve(count, length - 1, plan.loops)
    batch = Batch(
        [Span(row, 0, prompt) for row in range(count)],
        rows[:, :prompt].flatten().tolist(),
        cache.device,
    )
    max_loops = [plan.loops] * count
    network.forward(batch, cache, max_loops, predict=batch.last_indices)
    exits = None if plan.exit is None else [plan.exit] * count
    nats, loops = [], []
    begin = time.perf_counter()
    for position in range(prompt, length - 1):
        spans = [Span(row, position) for row in range(count)]
        batch = Batch(spans, rows[:, position].tolist(), cache.device)
        output = network.forward(batch, cache, max_loops, exits)
        nats.append(F.cross_entropy(output.logits, rows[:, position + 1].long(), reduction="none"))
        loops.append(torch.tensor(output.loops))
        if on_step is not None:
            on_step()
    seconds = time.perf_counter() - begin
    return Decoded(torch.stack(nats, 1).cpu(), torch.stack(loops, 1), seconds)
