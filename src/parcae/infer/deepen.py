"""Loop every token as often as it needs, and not once more.

Parts that have ended leave the pass: the loops that are left run on the others alone. What comes
back stands in the order the parts came in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parcae.infer.cache import Cache
from parcae.infer.exit import ExitRule, Watch
from parcae.infer.extrapolate import STATES, Extrapolation, extrapolate
from parcae.infer.native.network import Depth, NativeNetwork
from parcae.infer.network import Network
from parcae.infer.work import Work


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What is to become of the tokens of a pass."""

    work: Work
    limits: Sequence[int]
    """How often each part loops, at most."""
    rules: Sequence[ExitRule | None] | None = None
    """When it may stop before. Such a part is a single token: a prompt is read at full depth."""
    extrapolation: Extrapolation = "none"
    start: Tensor | None = None
    """States to begin with [N, d_h], instead of zeros."""
    predict: Sequence[int] | None = None
    """Tokens whose logits are wanted; all if left out."""

    def __post_init__(self) -> None:
        if self.rules and any(self.rules) and self.work.tokens > len(self.work.parts):
            raise ValueError("exit rules are for single tokens; a prompt is read at full depth.")

    @property
    def rule_of_each(self) -> Sequence[ExitRule | None]:
        return [None] * len(self.limits) if self.rules is None else self.rules

    @property
    def predicted(self) -> Sequence[int]:
        return range(self.work.tokens) if self.predict is None else self.predict

    @property
    def loops(self) -> range:
        """All that some part may run."""
        return range(1, max(self.limits) + 1)


@dataclass(frozen=True, eq=False)
class Reached:
    """Where the tokens of a pass ended."""

    logits: Tensor
    """[n, V], of the tokens that were to be predicted from."""
    state: Tensor
    """h [N, d_h], as the loop left it."""
    loops: list[int]
    """How many each part ran."""

    @property
    def rows(self) -> list[np.ndarray]:
        """The logits one by one, for whoever chooses tokens. By numpy, for after a pass nothing is
        in the caches of the CPU, and an operator of PyTorch takes longer than finding the largest.
        """
        logits = self.logits if self.logits.is_cpu else self.logits.cpu()
        return list(logits.numpy())


def deepen(network: Network, cache: Cache, task: Task) -> Reached:
    """From the first loop to each part's limit, or to where its rule lets it stop."""
    native = network.native
    if native is None or not native.takes(task.work):
        return _step_by_step(network, network, cache, task)
    if task.extrapolation != "none":
        return _step_by_step(network, native, cache, task)
    return _in_one_call(native, cache, task)


def _in_one_call(native: NativeNetwork, cache: Cache, task: Task) -> Reached:
    """C++ can tell by itself when a token stops."""
    limits, rules = task.limits, task.rule_of_each
    depth = None
    if task.rules is not None or len(set(limits)) > 1:
        pairs = list(zip(rules, limits, strict=True))
        depth = Depth(
            limits=[limit if rule is None else rule.most_loops(limit) for rule, limit in pairs],
            least_changes=[0.0 if rule is None else rule.least_change for rule in rules],
            kinds=[None if rule is None else rule.kind for rule in rules],
            settled=limits,
        )
    logits, state, ran = native.all_at_once(
        task.work, cache, task.loops, depth, task.start, task.predicted
    )
    loops = [ran[place] for place in task.work.last_tokens] if ran else list(limits)
    return Reached(logits, state, loops)


def _step_by_step(
    network: Network, stages: Network | NativeNetwork, cache: Cache, task: Task
) -> Reached:
    work = task.work
    drive = stages.begin(work, cache)
    h = torch.zeros_like(drive) if task.start is None else task.start
    if any(task.rule_of_each) or task.extrapolation != "none" or len(set(task.limits)) > 1:
        x, h, loops = _Descent(network, stages, cache, task, drive).run(h)
    else:
        h = stages.loop(h, drive, work, cache, task.loops)
        x = stages.read(h, work, cache)
        loops = list(task.limits)
    return Reached(stages.logits(x[list(task.predicted)]), h, loops)


class _Descent:
    """One pass whose parts end at different loops."""

    def __init__(
        self,
        network: Network,
        stages: Network | NativeNetwork,
        cache: Cache,
        task: Task,
        drive: Tensor,
    ) -> None:
        self.network, self.stages, self.cache, self.task = network, stages, cache, task
        self.work, self.drive = task.work, drive
        self.limits = list(task.limits)
        self.watch = Watch(task.rule_of_each, stages.logits, network.unembedding)
        self.parts = list(range(len(self.limits)))
        self.tokens = list(range(self.work.tokens))
        self.loops = [0] * len(self.limits)
        self.readings: dict[int, Tensor] = {}

    def run(self, h: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """What the head reads, the states, and the loops of each part."""
        final, read_from = torch.empty_like(h), torch.empty_like(h)
        history = [h]
        loop = 0
        while self.parts:
            loop += 1
            before, only = history[-1], range(loop, loop + 1)
            h = self.stages.loop(before, self.drive, self.work, self.cache, only)
            history = [*history[1 - STATES :], h]
            guess = extrapolate(self.task.extrapolation, history)
            ended = self._ended(loop, before, h, guess)
            if not any(ended):
                continue
            leaving = self.work.tokens_of({i for i, end in enumerate(ended) if end})
            places = [self.tokens[place] for place in leaving]
            final[places], read_from[places] = h[leaving], guess[leaving]
            for index, end in enumerate(ended):
                if end:
                    self._leave(index, loop)
            staying = [i for i, end in enumerate(ended) if not end]
            kept = self.work.tokens_of(set(staying))
            history = [state[kept] for state in history]
            self._keep(staying, kept)
        return self._read(read_from), final, self.loops

    def _ended(self, loop: int, before: Tensor, h: Tensor, guess: Tensor) -> list[bool]:
        work = self.work
        stopped = self.watch.finished(
            loop, before, h, lambda: self.stages.read(guess, work, self.cache)
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

    def _keep(self, staying: list[int], tokens: list[int]) -> None:
        self.parts = [self.parts[index] for index in staying]
        self.tokens = [self.tokens[place] for place in tokens]
        self.watch.keep(staying)
        if staying:
            self.drive, self.work = self.drive[tokens], self.work.only(staying)

    def _read(self, states: Tensor) -> Tensor:
        """What the head reads; parts that exited on a reading have it already."""
        work = self.task.work
        unread = [part for part in range(len(work.parts)) if part not in self.readings]
        if len(unread) == len(work.parts):
            return self.stages.read(states, work, self.cache)
        x = states.new_empty(work.tokens, self.network.config.width)
        if unread:  # only single tokens are ever watched, so parts and tokens agree
            x[unread] = self.stages.read(states[unread], work.only(unread), self.cache)
        for part, reading in self.readings.items():
            x[part] = reading
        return x
