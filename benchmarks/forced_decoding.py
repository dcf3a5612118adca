"""Loss of a model as it decodes: token by token over a cache, with whatever shortcuts it is given.

Rows of held-out text are forced through the engine's own passes: a few tokens are read as a prompt,
each further one is decoded, and what the model had predicted for it is scored.
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
from parcae.infer.cache import Policy
from parcae.infer.forward import forward
from parcae.infer.network import Network, without_autocast
from parcae.infer.request import DepthPlan


@dataclass(frozen=True, eq=False)
class Decoded:
    """What decoding some rows came to."""

    nats: Tensor
    """For each row and decoded position [rows, positions]."""
    loops: Tensor
    """How often each of them looped, alike."""
    seconds: float
    """Spent decoding; the prompts are not counted."""

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
) -> Decoded:
    """`rows` [B, S] of token ids, decoded side by side; the last token is only predicted."""
    length = rows.shape[1]
    some = 0 < prompt < length - 1
    require(some, "prompt", f"{prompt} of {length} tokens", "Leave two to decode and predict.")
    limit = network.layout.context_length
    require(length <= limit + 1, "rows", f"{length} tokens do not fit in {limit}", "Cut them.")
    with without_autocast(network.device):
        return _decode(network, rows, plan, Policy.parse(policy), prompt, on_step)


def _decode(
    network: Network,
    rows: Tensor,
    plan: DepthPlan,
    policy: Policy,
    prompt: int,
    on_step: Callable[[], None] | None,
) -> Decoded:
    count, length = rows.shape
    cache = network.cache(policy)
    cache.reserve(count, length - 1, plan.loops)
    batch = Batch(
        [Span(row, 0, prompt) for row in range(count)],
        rows[:, :prompt].flatten().tolist(),
        network.device,
    )
    max_loops = [plan.loops] * count
    forward(network, cache, batch, max_loops, predict=batch.last_indices)
    exits = None if plan.exit is None else [plan.exit] * count
    nats, loops = [], []
    begin = time.perf_counter()
    for position in range(prompt, length - 1):
        spans = [Span(row, position) for row in range(count)]
        batch = Batch(spans, rows[:, position].tolist(), network.device)
        output = forward(network, cache, batch, max_loops, exits)
        nats.append(F.cross_entropy(output.logits, rows[:, position + 1].long(), reduction="none"))
        loops.append(torch.tensor(output.loops))
        if on_step is not None:
            on_step()
    seconds = time.perf_counter() - begin
    return Decoded(torch.stack(nats, 1).cpu(), torch.stack(loops, 1), seconds)
