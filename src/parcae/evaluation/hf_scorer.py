"""Any causal language model of Hugging Face's library as a scorer, for the same table.

    scorer = ForeignScorer.open("openai-community/gpt2")        a name on the hub, or a folder

Sequences are padded on the right, which a causal model does not see, and only the predictions that
are scored are computed where the model's class can leave out the others.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parcae.config import ConfigError, require
from parcae.evaluation.prompts import Prompt
from parcae.evaluation.scoring import Answer, read_predictions
from parcae.files import FileError

BATCH_TOKENS = 4096
LONGEST_CONTEXT = 1 << 20
"""Beyond this, a tokenizer's limit stands for none."""

Row = tuple[int, ...]
Place = tuple[int, int]
"""A position that predicts, and the token it is asked about."""
Reading = tuple[Tensor, Tensor]
"""Nats of that token and the likeliest one."""


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
        least = "Use at least 1."
        require(batch_tokens >= 1, "batch_tokens", f"{batch_tokens} is too few", least)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name, self.identity, self.batch_tokens = name, identity, batch_tokens
        self.context_length = context_length or _context_length(model, tokenizer)
        self.bos: int | None = (
            tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        )
        self.opening = _opening(tokenizer)
        self.keeps_chosen = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._check_causal()

    @classmethod
    def open(cls, name: str, device: str | torch.device = "cpu", **options: Any) -> ForeignScorer:
        try:  # from where they are: the library's front door costs the type checker 20 seconds
            from transformers.models.auto.modeling_auto import AutoModelForCausalLM
            from transformers.models.auto.tokenization_auto import AutoTokenizer
        except ImportError:
            raise ConfigError(
                "other models need the library transformers: pip install 'parcae[hf]'."
            ) from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model: Any = AutoModelForCausalLM.from_pretrained(name)
        except Exception as error:  # what a broken folder raises depends on what is broken
            first = str(error).strip().split("\n")[0]
            raise FileError(
                f"{name}: neither a model of ours nor one that transformers can open ({first}). "
                "Check the path; a name on the hub needs a network the first time."
            ) from None
        return cls(model.to(device), tokenizer, name=name, **options)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def cost(self, prompt: Prompt) -> int:
        return sum(map(len, _inputs(prompt)))

    def score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        asked: dict[Row, set[Place]] = {}
        for prompt in prompts:
            for row, places in zip(_inputs(prompt), _places(prompt), strict=True):
                asked.setdefault(row, set()).update(places)
        found: dict[tuple[Row, Place], Reading] = {}
        for rows in _padded(sorted(asked, key=len), self.batch_tokens):
            found.update(self._read(rows, asked))
        return [list(_answers(prompt, found)) for prompt in prompts]

    @torch.no_grad()
    def _read(
        self, rows: Sequence[Row], asked: dict[Row, set[Place]]
    ) -> Iterator[tuple[tuple[Row, Place], Reading]]:
        """All that is asked about some rows, from one pass. No logits outlive it: a vocabulary is
        large."""
        kept = sorted({position for row in rows for position, _ in asked[row]})
        logits = self._logits(rows, kept)
        at = {position: i for i, position in enumerate(kept)} if self.keeps_chosen else None
        wanted = [(row, place) for row in rows for place in sorted(asked[row])]
        number = {row: i for i, row in enumerate(rows)}
        lines = [number[row] for row, _ in wanted]
        columns = [position if at is None else at[position] for _, (position, _) in wanted]
        flat = torch.tensor(lines) * logits.shape[1] + torch.tensor(columns)
        targets = torch.tensor([token for _, (_, token) in wanted], device=logits.device)
        whole = logits.flatten(0, 1)
        nats, likeliest = read_predictions(
            lambda part: whole[part], flat.to(logits.device), targets, logits.shape[2]
        )
        yield from zip(wanted, zip(nats, likeliest, strict=True), strict=True)

    def _logits(self, rows: Sequence[Row], kept: Sequence[int]) -> Tensor:
        """[rows, kept, V], or [rows, longest, V] where the model cannot leave anything out."""
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        device = self.model.device
        options: dict[str, Any] = {"use_cache": False}
        if self.keeps_chosen:
            options["logits_to_keep"] = torch.tensor(kept, device=device)
        return self.model(ids.to(device), attention_mask=mask.to(device), **options).logits

    @torch.no_grad()
    def _check_causal(self) -> None:
        """The library opens models that read in both directions as if they wrote: what they are
        asked about they would have seen."""
        ending = [self._logits([(0, 1, 2, last)], range(4))[0].float() for last in (3, 4)]
        apart = (ending[0] - ending[1]).abs().amax(1)
        rounding = torch.finfo(self.model.dtype).eps ** 0.5
        require(
            not bool(apart[:-1].max() > rounding * apart[-1]),  # not a number is told elsewhere
            self.name,
            "its predictions depend on what comes after them, so it is not a causal model",
            "Use one that writes from left to right.",
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Changes with whatever changes the tokens of a text."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    held = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, _opening(tokenizer))
    return hashlib.sha256(json.dumps([held, marks]).encode()).hexdigest()


def _inputs(prompt: Prompt) -> list[Row]:
    """What the model reads: all but the last scored token."""
    pairs = zip(prompt.sequences, prompt.spans, strict=True)
    return [tokens[: span.end - 1] for tokens, span in pairs]


def _places(prompt: Prompt) -> list[list[Place]]:
    pairs = zip(prompt.sequences, prompt.spans, strict=True)
    return [[(at - 1, tokens[at]) for at in range(*span)] for tokens, span in pairs]


def _answers(prompt: Prompt, found: dict[tuple[Row, Place], Reading]) -> Iterator[Answer]:
    for row, places in zip(_inputs(prompt), _places(prompt), strict=True):
        nats, likeliest = zip(*(found[row, place] for place in places), strict=True)
        expected = torch.tensor([token for _, token in places])
        yield Answer(torch.stack(nats)[None], torch.stack(likeliest)[None], expected)


def _padded(rows: Sequence[Row], most: int) -> Iterator[Sequence[Row]]:
    """Rows of rising length in groups whose padded size stays within `most`."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or len(rows[end]) * (end + 1 - start) > most:
            yield rows[start:end]
            start = end


def _opening(tokenizer: Any) -> tuple[int, ...]:
    """What it puts before a text of its own accord: BOS for Llama, nothing for GPT-2."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()


def _context_length(model: Any, tokenizer: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    known = (getattr(model.config, name, None) for name in names)
    limits = [limit for limit in (*known, tokenizer.model_max_length) if isinstance(limit, int)]
    limits = [limit for limit in limits if 0 < limit < LONGEST_CONTEXT]
    require(bool(limits), "context", "the model does not say how much it reads", "Give --context.")
    return min(limits)
