"""What every loop does to the prediction of every token of one text.

    trace = parcae.trace_loops(model, [bos, *tokenizer.encode("def main():")], loops=8)
    trace.loss[:, 3]            # loss of the fourth predicted token after 1, 2, .. 8 loops

The model runs on all positions at once, without a cache. A column is one prediction: the state at
one position, and what it predicts for the next token.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parcae.config import require
from parcae.infer.sampling import check_logits
from parcae.model.base import IGNORED_TARGET, LanguageModel
from parcae.model.looped import LoopedModel
from parcae.schema import require_range
from parcae.tables import html_table


def shown_depths(loops: int) -> list[int]:
    """1, 2, 4, .. and the last."""
    return sorted({2**k for k in range(loops.bit_length()) if 2**k <= loops} | {loops})


@dataclass(frozen=True, eq=False)
class LoopTrace:
    """Rows are loops 1 .. T, columns the predicted tokens: all tokens of the text but the first, or
    the answers of a task."""

    targets: Tensor
    """The predicted tokens [S]."""
    loss: Tensor
    """In nats [T, S]."""
    change: Tensor
    """||h_t - h_(t-1)|| / ||h_t|| of the state at each position [T, S]; h_0 is zero, so the first
    row is 1."""
    predicted: Tensor
    """The most likely token [T, S]."""

    @property
    def loops(self) -> int:
        return len(self.loss)

    def _repr_html_(self) -> str:
        """The conclusion, and for each predicted token its loss by loops."""
        columns = {f"T={t}": self.loss[t - 1].tolist() for t in shown_depths(self.loops)}
        columns |= {"settled": self.settled.tolist(), "prediction": self.predicted[-1].tolist()}
        rows = [
            {"token": token, **{name: values[index] for name, values in columns.items()}}
            for index, token in enumerate(self.targets.tolist())
        ]
        return f"<p>{html.escape(self.conclusion)}</p>{html_table(rows)}"

    @property
    def settled(self) -> Tensor:
        """The first loop after which the most likely token no longer changes [S]."""
        differs = self.predicted != self.predicted[-1]
        after = torch.arange(1, self.loops + 1)[:, None] * differs
        return after.amax(0) + 1

    @property
    def conclusion(self) -> str:
        """One line: what the loops after the first do to loss and predictions."""
        means = self.loss.mean(1).tolist()
        first, last, gain = means[0], means[-1], means[0] - means[-1]
        if self.loops == 1:
            return f"One loop: a mean loss of {first:.2f} nats."
        settled = int((self.settled == 1).sum())
        after = f"{settled} of {len(self.targets)} predictions are those of the first loop."
        if f"{first:.2f}" == f"{last:.2f}":
            return f"The mean loss is {last:.2f} nats after 1 and {self.loops} loops; {after}"
        if gain < 0:
            text = f"{self.loops} loops raise the mean loss from {first:.2f} to {last:.2f} nats"
            return f"{text}; {after}"
        most = next(t for t, loss in enumerate(means, 1) if first - loss >= 0.9 * gain)
        text = f"{self.loops} loops lower the mean loss from {first:.2f} to {last:.2f} nats"
        return f"{text}, {most} do nine tenths of it; {after}"


@torch.no_grad()
def trace_loops(
    model: LanguageModel,
    tokens: Sequence[int],
    loops: int | None = None,
    answers: Sequence[int] | None = None,
) -> LoopTrace:
    """Predict every token of a text but the first, after every loop.

    `loops` defaults to the mean number of loops in training. `answers`: what is right at each
    position instead of the next token, -100 where nothing is asked, as in a synthetic task.
    """
    model, count = _looped(model, loops)
    if answers is None:
        problem = f"{len(tokens)} tokens; the first one is not predicted"
        require(len(tokens) >= 2, "text", problem, "Give at least 2 tokens.")
        tokens, answers = tokens[:-1], tokens[1:]
    asked = [index for index, answer in enumerate(answers) if answer != IGNORED_TARGET]
    require(bool(asked), "text", "no position has an answer", "Ask for at least one.")
    targets = torch.tensor([answers[index] for index in asked], device=model.device)
    losses, changes, predicted = [], [], []
    for change, x in _readings(model, tokens, count):
        logits = model.logits(x[asked])
        check_logits(logits)
        changes.append(change[asked])
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        predicted.append(logits.argmax(-1))
    return LoopTrace(
        targets.cpu(),
        torch.stack(losses).cpu(),
        torch.stack(changes).cpu(),
        torch.stack(predicted).cpu(),
    )


@dataclass(frozen=True)
class LoopPrediction:
    """What the state at one position predicts after one loop."""

    change: float
    """||h_t - h_(t-1)|| / ||h_t||; 1 after the first loop."""
    likeliest: list[tuple[int, float]]
    """Tokens and their probabilities, the most likely first."""


@torch.no_grad()
def trace_next_token(
    model: LanguageModel, tokens: Sequence[int], loops: int | None = None, top: int = 5
) -> list[LoopPrediction]:
    """The `top` most likely tokens after `tokens`, predicted after every loop."""
    model, count = _looped(model, loops)
    predictions = []
    for change, x in _readings(model, tokens, count):
        logits = model.logits(x[-1:])[0]
        check_logits(logits)
        best = torch.topk(logits.double().softmax(-1), min(top, len(logits)))
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        predictions.append(LoopPrediction(float(change[-1]), pairs))
    return predictions


def _looped(model: LanguageModel, loops: int | None) -> tuple[LoopedModel, int]:
    is_looped = isinstance(model, LoopedModel)
    require(is_looped, "model", "a Transformer has no loop to trace", "Give a looped model.")
    assert isinstance(model, LoopedModel)
    count = model.config.loop.nominal_loops if loops is None else loops
    require_range("loops", count, at_least=1)
    return model, count


def _readings(
    model: LoopedModel, tokens: Sequence[int], loops: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """After every loop, the relative change of the state [S] and the output of the coda [S, d]."""
    inputs = torch.tensor([list(tokens)], device=model.device)
    previous: Tensor | None = None
    for _, h in zip(range(loops), model.iterate(inputs, state="zero"), strict=False):
        step = h if previous is None else h - previous
        yield _norm(step) / _norm(h).clamp(min=1e-30), model.decode(h, inputs)[0]
        previous = h


def _norm(states: Tensor) -> Tensor:
    """Norms [S] of the only row."""
    return torch.linalg.vector_norm(states[0].float(), dim=-1)
