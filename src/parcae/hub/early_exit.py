"""Early exit in transformers, while one token is decoded per row."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class EarlyExit:
    """Decides after each loop which rows stop.

    A row that has stopped keeps its state, and in deeper loops it is represented by the keys and
    values of its last loop, as in `parcae.Engine`.
    """

    def __init__(self, rule: str, layers: int) -> None:
        name, _, threshold = rule.partition(":")
        try:
            self.threshold = float(threshold)
        except ValueError:
            self.threshold = math.nan
        if name not in ("state", "budget") or not self.threshold > 0:
            raise ValueError(
                f"exit: {rule!r}. Use 'state:THRESHOLD' or 'budget:LOOPS' with a positive number; "
                "other rules need parcae.Engine."
            )
        self.is_budget = name == "budget"
        self.layers = layers
        """Layers of the core."""
        self.stopped: Tensor | None = None
        """Which rows have stopped [B]; None in the first loop."""
        self.last: list[tuple[Tensor, Tensor]] = []
        """Keys and values of the core's layers in the last loop."""
        self.layer = 0

    @property
    def all_stopped(self) -> bool:
        return self.stopped is not None and bool(self.stopped.all())

    def hold(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values to cache; called once per layer of the core, in order."""
        if self.stopped is None:
            self.last.append((key, value))
            return key, value
        stopped = self.stopped[:, None, None, None].to(key.device)
        last_key, last_value = self.last[self.layer]
        key, value = torch.where(stopped, last_key, key), torch.where(stopped, last_value, value)
        self.last[self.layer] = (key, value)
        self.layer = (self.layer + 1) % self.layers
        return key, value

    def observe(self, loops: int, before: Tensor, after: Tensor) -> Tensor:
        """The state after a loop, in which stopped rows do not take part; decides who stops."""
        if self.stopped is None:
            self.stopped = torch.zeros(len(after), dtype=torch.bool, device=after.device)
        after = torch.where(self.stopped[:, None, None], before, after)
        if self.is_budget:
            self.stopped = self.stopped | (loops >= self.threshold)
        else:
            moved = (after - before).float().norm(dim=-1) / after.float().norm(dim=-1)
            self.stopped = self.stopped | (moved[:, -1] < self.threshold)
        return after

    def fill(self, cache: Cache, first: int) -> None:
        """Cache a loop in which all rows have stopped, in the slots from `first` on."""
        for layer, (key, value) in enumerate(self.last):
            cache.update(key, value, first + layer)
