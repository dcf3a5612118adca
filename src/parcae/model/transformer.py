"""The fixed-depth baseline: the same blocks, each run once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parcae.config import ModelConfig
from parcae.model.base import LanguageModel, LoopRequest, Output
from parcae.model.blocks import Stack


class Transformer(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.blocks = Stack(config, 0, config.layers)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)

    def compile_layers(self, **options: Any) -> None:
        self.blocks.compile(**options)

    def activation_checkpointing(self) -> None:
        """Do nothing: there is no loop."""

    def draw(self, seed: int, step: int, rows: Sequence[int], length: int) -> dict[str, Any]:
        return {}

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        loops: LoopRequest = None,
        generator: torch.Generator | None = None,
    ) -> Output:
        """The same interface as a looped model; `loops` is 1."""
        self.check(tokens, targets)
        ran = self.resolve_loops(loops, len(tokens), generator)
        if set(ran.loops) != {1}:
            raise ValueError(f"loops: {loops}. A Transformer has no loop; omit loops.")
        x = self._read(tokens)
        if targets is not None:
            return Output(logits=None, loss=self.loss(x, targets), depths=ran)
        return Output(logits=self.logits(x), loss=None, depths=ran)

    @torch.no_grad()
    def readings(
        self,
        tokens: Tensor,
        loops: Collection[int],
        state: Tensor | Literal["zero", "like-init"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """At 1 loop only; `state` and `generator` are ignored."""
        self.check(tokens, None)
        if any(count != 1 for count in loops):
            raise ValueError(f"loops: {[*loops]}. A Transformer has no loop; ask for 1 only.")
        if loops:
            yield 1, self._read(tokens)

    def _read(self, tokens: Tensor) -> Tensor:
        rope = self.rope(tokens.shape[1], self.config.block.head_dim)
        values = self.values(tokens, 0, self.config.layers)
        return self.norm(self.blocks(self.embed(tokens), rope, values))
