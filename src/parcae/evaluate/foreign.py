"""Any causal language model of Hugging Face's library as a scorer, for the same table.

    scorer = ForeignScorer.open("openai-community/gpt2")        a name on the hub, or a folder

Sequences are padded on the right, which a causal model does not see, and only the predictions that
are scored are computed where the model's class can leave out the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parcae.config import ConfigError, require
from parcae.evaluate.prompts import Prompt
from parcae.evaluate.scoring import Answer, read_predictions
from parcae.files import FileError

BATCH_TOKENS = 4096
LONGEST_CONTEXT = 1 << 20
"""Beyond this, a tokenizer's limit stands for none."""


class ForeignScorer:
    depths: tuple[int, ...] = (1,)
    is_looped = False
    draws_state = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "model",
        identity: str = "",
        context_length: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name, self.identity, self.batch_tokens = name, identity, batch_tokens
        self.context_length = context_length or _context_length(model, tokenizer)
        self.bos: int | None = (
            tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        )
        self.keeps_chosen = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def open(cls, name: str, device: str | torch.device = "cpu", **options: Any) -> ForeignScorer:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise ConfigError(
                "other models need the library transformers: pip install 'parcae[hf]'."
            ) from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model: Any = AutoModelForCausalLM.from_pretrained(name)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().split("\n")[0]
            raise FileError(
                f"{name}: neither a model of ours nor one that transformers can open ({first}). "
                "Check the path; a name on the hub needs a network the first time."
            ) from None
        revision = getattr(model.config, "_commit_hash", None)
        return cls(model.to(device), tokenizer, name=name, identity=f"{name} {revision}", **options)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def cost(self, prompt: Prompt) -> int:
        return sum(map(len, _inputs(prompt)))

    def score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        whole = sorted({tokens for prompt in prompts for tokens in _inputs(prompt)}, key=len)
        scored = {tokens: set[int]() for tokens in whole}
        for prompt in prompts:
            for tokens, span in zip(_inputs(prompt), prompt.spans, strict=True):
                scored[tokens].update(range(span.start - 1, span.end - 1))
        logits: dict[tuple[tuple[int, ...], int], Tensor] = {}
        for rows in _padded(whole, self.batch_tokens):
            logits.update(self._logits(rows, scored))
        return [list(self._answers(prompt, logits)) for prompt in prompts]

    @torch.no_grad()
    def _logits(
        self, rows: Sequence[tuple[int, ...]], scored: dict[tuple[int, ...], set[int]]
    ) -> Iterator[tuple[tuple[tuple[int, ...], int], Tensor]]:
        """Predictions at the scored places of each row."""
        longest = len(rows[-1])
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        kept = sorted(set().union(*(scored[tokens] for tokens in rows)))
        device = self.model.device
        options: dict[str, Any] = {"use_cache": False}
        if self.keeps_chosen:
            options["logits_to_keep"] = torch.tensor(kept, device=device)
        out = self.model(ids.to(device), attention_mask=mask.to(device), **options).logits
        places = {place: at for at, place in enumerate(kept)}
        for row, tokens in enumerate(rows):
            for place in scored[tokens]:
                at = places[place] if self.keeps_chosen else place
                yield (tokens, place), out[row, at]

    def _answers(
        self, prompt: Prompt, logits: dict[tuple[tuple[int, ...], int], Tensor]
    ) -> Iterator[Answer]:
        for tokens, span, whole in zip(
            _inputs(prompt), prompt.spans, prompt.sequences, strict=True
        ):
            rows = [logits[tokens, place] for place in range(span.start - 1, span.end - 1)]
            targets = torch.tensor(whole[span.start : span.end])
            predicted = torch.stack(rows)
            nats, likeliest = read_predictions(
                lambda x: x, predicted, targets.to(predicted.device), predicted.shape[1]
            )
            yield Answer(nats[None], likeliest[None], targets)


def _inputs(prompt: Prompt) -> list[tuple[int, ...]]:
    """What the model reads: all but the last scored token."""
    pairs = zip(prompt.sequences, prompt.spans, strict=True)
    return [tokens[: span.end - 1] for tokens, span in pairs]


def _padded(rows: Sequence[tuple[int, ...]], most: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """Rows of rising length in groups whose padded size stays within `most`."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or len(rows[end]) * (end + 1 - start) > most:
            yield rows[start:end]
            start = end


def _context_length(model: Any, tokenizer: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    known = (getattr(model.config, name, None) for name in names)
    limits = [limit for limit in (*known, tokenizer.model_max_length) if isinstance(limit, int)]
    limits = [limit for limit in limits if 0 < limit < LONGEST_CONTEXT]
    require(bool(limits), "context", "the model does not say how much it reads", "Give --context.")
    return min(limits)
