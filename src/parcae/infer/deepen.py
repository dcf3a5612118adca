"""Loop every token as often as it needs, and not once more.

Parts that have ended leave the pass: the loops that are left run on the others alone. What comes
back stands in the order the parts came in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parcae.infer.cache import Cache
from parcae.infer.exit import ExitRule, Watch
from parcae.infer.extrapolate import STATES, Extrapolation, extrapolate
from parcae.infer.network import Given, Network
from parcae.infer.work import Work


@dataclass(frozen=True, eq=False)
class Reached:
    """Where the tokens of a pass ended."""

    x: Tensor
    """What the head reads [N, d_e]."""
    state: Tensor
    """h [N, d_h], as the loop left it."""
    loops: list[int]
    """How many each part ran."""


def deepen(
    network: Network,
    cache: Cache,
    given: Given,
    work: Work,
    h: Tensor,
    limits: Sequence[int],
    rules: Sequence[ExitRule | None] | None = None,
    extrapolation: Extrapolation = "none",
) -> Reached:
    """From the first loop to each part's limit, or to where its rule lets it stop.

    A part with a rule must be a single token: a prompt is read at full depth.
    """
    rules = [None] * len(limits) if rules is None else rules
    watched = any(rule is not None for rule in rules)
    if watched and work.tokens > len(work.parts):
        raise ValueError("exit rules are for single tokens; a prompt is read at full depth.")
    if not watched and extrapolation == "none" and len(set(limits)) == 1:
        h = network.loop(h, given, work, cache, range(1, limits[0] + 1))
        return Reached(network.read(h, given, work, cache), h, list(limits))
    if extrapolation == "none" and not any(rule is not None and rule.reads for rule in rules):
        reached = _deepen_in_one_call(network, cache, given, work, h, limits, rules)
        if reached is not None:
            return reached
    return _Descent(network, cache, given, work, limits, rules, extrapolation).run(h)


def _deepen_in_one_call(
    network: Network,
    cache: Cache,
    given: Given,
    work: Work,
    h: Tensor,
    limits: Sequence[int],
    rules: Sequence[ExitRule | None],
) -> Reached | None:
    """Where the C++ layers can tell by themselves when a token stops."""
    shorter = [rule.most_loops(t) if rule else t for rule, t in zip(rules, limits, strict=True)]
    thresholds = [rule.least_change if rule else 0.0 for rule in rules]
    body = network.loop_body
    ended = body and body.run_each(h, given, work, cache, shorter, thresholds)
    if ended is None:
        return None
    state, loops = ended
    for part, ran, limit in zip(work.parts, loops, limits, strict=True):
        if ran < limit and part.count == 1:
            cache.settle(part.row, part.first, ran, limit)
    return Reached(network.read(state, given, work, cache), state, loops)


class _Descent:
    """One pass whose parts end at different loops."""

    def __init__(
        self,
        network: Network,
        cache: Cache,
        given: Given,
        work: Work,
        limits: Sequence[int],
        rules: Sequence[ExitRule | None],
        extrapolation: Extrapolation,
    ) -> None:
        self.network, self.cache = network, cache
        self.extrapolation: Extrapolation = extrapolation
        self.given, self.work = given, work
        self.whole = (given, work)
        self.limits = list(limits)
        self.watch = Watch(rules, network.logits, network.unembedding)
        self.parts = list(range(len(limits)))
        self.tokens = torch.arange(work.tokens, device=network.device)
        self.loops = [0] * len(limits)
        self.readings: dict[int, Tensor] = {}

    def run(self, h: Tensor) -> Reached:
        final, read_from = torch.empty_like(h), torch.empty_like(h)
        history = [h]
        loop = 0
        while self.parts:
            loop += 1
            before = history[-1]
            h = self.network.loop(before, self.given, self.work, self.cache, range(loop, loop + 1))
            history = [*history[1 - STATES :], h]
            guess = extrapolate(self.extrapolation, history)
            ended = self._ended(loop, before, h, guess)
            if not any(ended):
                continue
            leaving = self._tokens_of([i for i, end in enumerate(ended) if end])
            final[self.tokens[leaving]] = h[leaving]
            read_from[self.tokens[leaving]] = guess[leaving]
            for index, end in enumerate(ended):
                if end:
                    self._leave(index, loop)
            staying = [i for i, end in enumerate(ended) if not end]
            kept = self._tokens_of(staying)
            history = [state[kept] for state in history]
            self._keep(staying, kept)
        return Reached(self._read(read_from), final, self.loops)

    def _ended(self, loop: int, before: Tensor, h: Tensor, guess: Tensor) -> list[bool]:
        given, work = self.given, self.work
        stopped = self.watch.finished(
            loop, before, h, lambda: self.network.read(guess, given, work, self.cache)
        )
        return [stop or self.limits[p] <= loop for stop, p in zip(stopped, self.parts, strict=True)]

    def _leave(self, index: int, loop: int) -> None:
        part = self.parts[index]
        self.loops[part] = loop
        if self.watch.reading is not None:
            self.readings[part] = self.watch.reading[index]
        if loop < self.limits[part]:
            at = self.work.parts[index]
            self.cache.settle(at.row, at.first, loop, self.limits[part])

    def _keep(self, staying: list[int], tokens: Tensor) -> None:
        self.parts = [self.parts[index] for index in staying]
        self.tokens = self.tokens[tokens]
        self.watch.keep(staying)
        if staying:
            self.given, self.work = self.given.only(tokens), self.work.only(staying)

    def _tokens_of(self, parts: list[int]) -> Tensor:
        """Places of these parts' tokens among those at hand."""
        places, start = [], 0
        chosen = set(parts)
        for index, part in enumerate(self.work.parts):
            if index in chosen:
                places.extend(range(start, start + part.count))
            start += part.count
        return torch.tensor(places, dtype=torch.long, device=self.network.device)

    def _read(self, states: Tensor) -> Tensor:
        """What the head reads; parts that exited on a reading have it already."""
        given, work = self.whole
        unread = [part for part in range(len(work.parts)) if part not in self.readings]
        if len(unread) == len(work.parts):
            return self.network.read(states, given, work, self.cache)
        x = states.new_empty(work.tokens, self.network.config.width)
        if unread:  # only single tokens are ever watched, so parts and tokens agree
            index = torch.tensor(unread, device=states.device)
            some = work.only(unread)
            x[index] = self.network.read(states[index], given.only(index), some, self.cache)
        for part, reading in self.readings.items():
            x[part] = reading
        return x
