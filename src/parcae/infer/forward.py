"""One pass of a batch through prelude, loops, coda and head, with a number of loops per span.

Spans that have finished looping leave the batch: the remaining loops run on the others alone. The
output is in the order of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parcae.infer.batch import Batch
from parcae.infer.cache import Cache
from parcae.infer.exit import ExitMonitor, ExitRule
from parcae.infer.network import Network


@dataclass(frozen=True, eq=False)
class PassOutput:
    logits: Tensor
    """[n, V], of the tokens in `predict`."""
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


def forward(
    network: Network,
    cache: Cache,
    batch: Batch,
    max_loops: Sequence[int],
    exits: Sequence[ExitRule | None] | None = None,
    predict: Sequence[int] | None = None,
) -> PassOutput:
    """Loop each span `max_loops` times, or until its exit rule stops it, and predict.

    `exits`: one rule or None per span; spans with a rule must be single tokens.
    `predict`: indices of the tokens whose logits are returned; the default is all.
    """
    if exits is not None and any(exits) and len(batch) > len(batch.spans):
        raise ValueError("exits: rules need spans of one token; prompts are read at full depth.")
    predict = range(len(batch)) if predict is None else predict
    native = network.native
    if native is not None and native.supports(batch, exits):
        logits, state, loops = native.forward(batch, cache, max_loops, exits, predict)
        return PassOutput(logits, state, loops)
    drive = network.begin(batch, cache)
    if (exits is not None and any(exits)) or len(set(max_loops)) > 1:
        exits = [None] * len(max_loops) if exits is None else exits
        x, h, loops = _LoopUntilExit(network, cache, batch, max_loops, exits, drive).run()
    else:
        all_loops = range(1, max(max_loops) + 1)
        h = network.loop(network.initial_state(batch), drive, batch, cache, all_loops)
        x, loops = network.read(h, batch, cache), list(max_loops)
    return PassOutput(network.logits(x[list(predict)]), h, loops)


class _LoopUntilExit:
    """The loops of a pass whose spans stop at different loops."""

    def __init__(
        self,
        network: Network,
        cache: Cache,
        batch: Batch,
        max_loops: Sequence[int],
        exits: Sequence[ExitRule | None],
        drive: Tensor,
    ) -> None:
        self.network, self.cache, self.whole_batch = network, cache, batch
        self.max_loops = max_loops
        self.monitor = ExitMonitor(exits, network.logits, network.unembedding)
        self.loops = [0] * len(max_loops)
        self.readings: dict[int, Tensor] = {}
        """The output of the coda for spans that stopped after a prediction was made."""
        self.batch, self.drive = batch, drive
        """Of the spans that still loop."""
        self.spans = list(range(len(max_loops)))
        self.tokens = list(range(len(batch)))
        """Which spans and tokens of the whole batch those are."""

    def run(self) -> tuple[Tensor, Tensor, list[int]]:
        """The output of the coda [N, d_e], the final states, and the loops of each span."""
        h = self.network.initial_state(self.batch)
        final = torch.empty_like(h)
        loop = 0
        while self.spans:
            loop += 1
            before = h
            h = self.network.loop(before, self.drive, self.batch, self.cache, range(loop, loop + 1))
            stopped = self._stopped(loop, before, h)
            if not any(stopped):
                continue
            leaving = self.batch.indices_of({i for i, stop in enumerate(stopped) if stop})
            final[[self.tokens[index] for index in leaving]] = h[leaving]
            for index, stop in enumerate(stopped):
                if stop:
                    self._finish(index, loop)
            h = h[self._keep([i for i, stop in enumerate(stopped) if not stop])]
        return self._read(final), final, self.loops

    def _stopped(self, loop: int, before: Tensor, h: Tensor) -> list[bool]:
        batch, cache = self.batch, self.cache
        stops = self.monitor.stopped(loop, before, h, lambda: self.network.read(h, batch, cache))
        pairs = zip(stops, self.spans, strict=True)
        return [stop or self.max_loops[span] <= loop for stop, span in pairs]

    def _finish(self, index: int, loop: int) -> None:
        span = self.spans[index]
        self.loops[span] = loop
        if self.monitor.reading is not None:
            self.readings[span] = self.monitor.reading[index]
        if loop < self.max_loops[span]:
            at = self.batch.spans[index]
            self.cache.settle(at.row, at.first, loop, self.max_loops[span])

    def _keep(self, indices: list[int]) -> list[int]:
        """Continue with these spans only; returns the indices of their tokens."""
        tokens = self.batch.indices_of(set(indices))
        self.spans = [self.spans[index] for index in indices]
        self.tokens = [self.tokens[index] for index in tokens]
        self.monitor.keep(indices)
        if indices:
            self.drive, self.batch = self.drive[tokens], self.batch.select(indices)
        return tokens

    def _read(self, states: Tensor) -> Tensor:
        """The output of the coda, which is known already for spans in `readings`."""
        batch = self.whole_batch
        unread = [span for span in range(len(batch.spans)) if span not in self.readings]
        if len(unread) == len(batch.spans):
            return self.network.read(states, batch, self.cache)
        x = states.new_empty(len(batch), self.network.config.width)
        if unread:  # with exit rules all spans are single tokens, so spans and tokens agree
            x[unread] = self.network.read(states[unread], batch.select(unread), self.cache)
        for span, reading in self.readings.items():
            x[span] = reading
        return x
