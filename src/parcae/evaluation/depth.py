"""What every loop does to the prediction of every token of one text.

    profile = follow(model, [bos, *tokenizer.encode("def main():")], loops=8)
    profile.loss[:, 3]       # how surprising the third token was after 1, 2, .. 8 loops

The model runs plainly, all positions at once and without a cache. A column is one prediction: the
state at one position, and what it says about the token that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import require
from parcae.infer.sampling import check_logits
from parcae.model.frame import LanguageModel
from parcae.model.looped import LoopedModel


@dataclass(frozen=True, eq=False)
class DepthProfile:
    """Rows are loops 1 .. T, columns the predicted tokens: all but the text's first."""

    targets: Tensor
    """The tokens that were predicted [S]."""
    loss: Tensor
    """Nats [T, S]."""
    change: Tensor
    """||h_t - h_(t-1)|| / ||h_t|| of the state that predicts [T, S]; h_0 is zero, so the first row
    is 1."""
    predicted: Tensor
    """The likeliest token [T, S]."""

    @property
    def loops(self) -> int:
        return len(self.loss)

    @property
    def settled(self) -> Tensor:
        """The loop from which on the likeliest token is the one after all loops [S]."""
        differs = self.predicted != self.predicted[-1]
        after = torch.arange(1, self.loops + 1)[:, None] * differs
        return after.amax(0) + 1


@torch.no_grad()
def follow(model: LanguageModel, tokens: Sequence[int], loops: int | None = None) -> DepthProfile:
    """Every token of a text but the first, which nothing precedes.

    `loops` left out is the mean the model was trained with.
    """
    looped = isinstance(model, LoopedModel)
    require(looped, "depth", "a Transformer has no loop to look into", "Give a looped model.")
    assert isinstance(model, LoopedModel)
    count = model.config.loop.nominal_loops if loops is None else loops
    require(count >= 1, "loops", f"{count} is not positive", "Use at least 1.")
    few = "Give a text of at least one token after the first."
    require(len(tokens) >= 2, "text", f"{len(tokens)} tokens predict nothing", few)
    ids = torch.tensor([list(tokens)], device=model.device)
    inputs, targets = ids[:, :-1], ids[0, 1:]
    states = model.iterate(inputs, state="zero")
    before: Tensor | None = None
    losses, changes, predicted = [], [], []
    for _, h in zip(range(count), states, strict=False):
        moved = h if before is None else h - before
        changes.append(_norm(moved) / _norm(h).clamp(min=1e-30))
        logits = model.logits(model.decode(h, inputs))[0]
        check_logits(logits)
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        predicted.append(logits.argmax(-1))
        before = h
    return DepthProfile(
        targets.cpu(),
        torch.stack(losses).cpu(),
        torch.stack(changes).cpu(),
        torch.stack(predicted).cpu(),
    )


def _norm(states: Tensor) -> Tensor:
    """[S], of the only row."""
    return torch.linalg.vector_norm(states[0].float(), dim=-1)
