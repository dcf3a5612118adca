"""A scorer for causal language models of the transformers library.

    scorer = HFScorer.open("openai-community/gpt2")        a name on the hub, or a folder

Sequences are padded on the right, which does not affect a causal model. Only the logits that are
scored are computed, where the class of the model has `logits_to_keep`.
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
from parcae.evaluation.prompts import Answer, Prompt
from parcae.evaluation.scorer import read_predictions
from parcae.files import FileError
from parcae.schema import require_range

BATCH_TOKENS = 4096
MAX_CONTEXT = 1 << 20
"""A tokenizer without a limit gives a larger number."""

Row = tuple[int, ...]
Target = tuple[int, int]
"""The position of a prediction, and the token whose loss is needed."""
Prediction = tuple[Tensor, Tensor]
"""Loss of that token, and the likeliest token."""


class HFScorer:
    """Score a transformers model; see `Scorer`."""

    loops: tuple[int, ...] = (1,)
    is_looped = False
    mean_loops: int | None = None
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
        require_range("batch_tokens", batch_tokens, at_least=1)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name, self.identity, self.batch_tokens = name, identity, batch_tokens
        self.context_length = context_length or _context_length(model, tokenizer)
        self.bos: int | None = (
            tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        )
        self.prefix = _prefix(tokenizer)
        self.has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._check_causal()

    @classmethod
    def open(
        cls,
        name: str,
        device: str | torch.device = "cpu",
        *,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> HFScorer:
        """Open a model by its folder or its name on the hub.

        `trust_remote_code`: run the Python code that comes with the model, if it has any. Without
        it such a model is refused; nobody is asked, whatever standard input holds.
        """
        try:  # the submodules: importing from `transformers` costs the type checker 20 seconds
            from transformers.models.auto.modeling_auto import AutoModelForCausalLM
            from transformers.models.auto.tokenization_auto import AutoTokenizer
        except ImportError:
            raise ConfigError(
                f"{name}: transformers is not installed. Run: pip install -e '.[hf]'"
            ) from None
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            model: Any = AutoModelForCausalLM.from_pretrained(
                name, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # transformers raises many types
            if not trust_remote_code and "trust_remote_code" in str(error):
                raise ConfigError(
                    f"{name}: the model comes with Python code of its own, which is not run. "
                    "Read the code, then allow it with `trust_remote_code`."
                ) from None
            reason = str(error).strip().split("\n")[0]
            raise FileError(
                f"{name}: neither a parcae model nor one that transformers can open ({reason}). "
                "Check the path; a model of the hub has to be downloaded once."
            ) from None
        return cls(model.to(device), tokenizer, name=name, **options)

    def at(self, loops: tuple[int, ...]) -> HFScorer:
        assert loops == self.loops
        return self

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def cost(self, prompt: Prompt) -> int:
        return sum(map(len, _inputs(prompt)))

    def score(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        targets: dict[Row, set[Target]] = {}
        for prompt in prompts:
            for row, of_row in zip(_inputs(prompt), _targets(prompt), strict=True):
                targets.setdefault(row, set()).update(of_row)
        predictions: dict[tuple[Row, Target], Prediction] = {}
        for rows in _batches(sorted(targets, key=len), self.batch_tokens):
            predictions.update(self._predict(rows, targets))
        return [list(_answers(prompt, predictions)) for prompt in prompts]

    @torch.no_grad()
    def _predict(
        self, rows: Sequence[Row], targets: dict[Row, set[Target]]
    ) -> Iterator[tuple[tuple[Row, Target], Prediction]]:
        """The predictions of all targets of some rows, from one pass."""
        kept = sorted({position for row in rows for position, _ in targets[row]})
        logits = self._logits(rows, kept)
        at = {position: i for i, position in enumerate(kept)} if self.has_logits_to_keep else None
        wanted = [(row, target) for row in rows for target in sorted(targets[row])]
        number = {row: i for i, row in enumerate(rows)}
        lines = [number[row] for row, _ in wanted]
        columns = [position if at is None else at[position] for _, (position, _) in wanted]
        flat = torch.tensor(lines) * logits.shape[1] + torch.tensor(columns)
        tokens = torch.tensor([token for _, (_, token) in wanted], device=logits.device)
        flat_logits = logits.flatten(0, 1)
        nats, likeliest = read_predictions(
            lambda part: flat_logits[part], flat.to(logits.device), tokens, logits.shape[2]
        )
        yield from zip(wanted, zip(nats, likeliest, strict=True), strict=True)

    def _logits(self, rows: Sequence[Row], kept: Sequence[int]) -> Tensor:
        """[rows, kept, V], or [rows, longest, V] where the model computes all logits."""
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        device = self.model.device
        options: dict[str, Any] = {"use_cache": False}
        if self.has_logits_to_keep:
            options["logits_to_keep"] = torch.tensor(kept, device=device)
        return self.model(ids.to(device), attention_mask=mask.to(device), **options).logits

    @torch.no_grad()
    def _check_causal(self) -> None:
        """Refuse a bidirectional model, which transformers opens as a causal one: it would read the
        tokens it is asked to predict."""
        a, b = (self._logits([(0, 1, 2, last)], range(4))[0].float() for last in (3, 4))
        difference = (a - b).abs().amax(1)
        rounding = torch.finfo(self.model.dtype).eps ** 0.5
        require(
            not bool(difference[:-1].max() > rounding * difference[-1]),  # NaN is reported later
            self.name,
            "not a causal model: its predictions depend on later tokens",
            "Use a causal language model.",
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of everything that determines the tokens of a text."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    definition = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, _prefix(tokenizer))
    return hashlib.sha256(json.dumps([definition, special]).encode()).hexdigest()


def _inputs(prompt: Prompt) -> list[Row]:
    """What the model reads of each alternative: all but the last scored token."""
    pairs = zip(prompt.sequences, prompt.spans, strict=True)
    return [tokens[: span.end - 1] for tokens, span in pairs]


def _targets(prompt: Prompt) -> list[list[Target]]:
    pairs = zip(prompt.sequences, prompt.spans, strict=True)
    return [[(at - 1, tokens[at]) for at in range(*span)] for tokens, span in pairs]


def _answers(prompt: Prompt, predictions: dict[tuple[Row, Target], Prediction]) -> Iterator[Answer]:
    for row, targets in zip(_inputs(prompt), _targets(prompt), strict=True):
        nats, likeliest = zip(*(predictions[row, target] for target in targets), strict=True)
        expected = torch.tensor([token for _, token in targets])
        yield Answer(torch.stack(nats)[None], torch.stack(likeliest)[None], expected)


def _batches(rows: Sequence[Row], max_tokens: int) -> Iterator[Sequence[Row]]:
    """Rows of rising length, in batches of at most `max_tokens` with padding."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or len(rows[end]) * (end + 1 - start) > max_tokens:
            yield rows[start:end]
            start = end


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """The tokens it puts before every text: BOS for Llama, none for GPT-2."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def _context_length(model: Any, tokenizer: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    known = (getattr(model.config, name, None) for name in names)
    limits = [limit for limit in (*known, tokenizer.model_max_length) if isinstance(limit, int)]
    limits = [limit for limit in limits if 0 < limit < MAX_CONTEXT]
    require(bool(limits), "context_length", "the model states none", "Give `context_length`.")
    return min(limits)
