"""Requests for text, and the checks that make a request valid before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from parcae.config import MAX_LOOPS, ConfigError, ModelConfig, require
from parcae.infer import DRAFT_TOKENS, MAX_NEW_TOKENS
from parcae.infer.exit import ExitRule
from parcae.infer.sampling import Sampling
from parcae.schema import require_range

MAX_DRAFT_TOKENS = 64
MAX_LOGPROBS = 100


@dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """How a sequence loops. Sequences with equal plans may reuse each other's cache."""

    loops: int
    exit: ExitRule | None = None
    """When a token may stop before `loops`."""
    draft_loops: int = 0
    """Loops of a speculative draft; 0 is no speculation."""
    draft_tokens: int = DRAFT_TOKENS
    """Tokens drafted before they are verified."""

    def __post_init__(self) -> None:
        check_whole("loops", self.loops, 1, MAX_LOOPS)
        check_whole("draft_loops", self.draft_loops, 0, MAX_LOOPS)
        if not self.draft_loops:
            return
        require(
            self.draft_loops < self.loops,
            "draft_loops",
            f"{self.draft_loops} loops cannot draft for {self.loops}",
            "Use fewer than loops.",
        )
        check_whole("draft_tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)
        remedy = "Omit exit, or draft_loops."
        require(self.exit is None, "draft_loops", "speculation needs a fixed depth", remedy)

    @property
    def generates_as_it_reads(self) -> bool:
        """Whether a generated token leaves the same cache as the same token in a prompt."""
        return self.exit is None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and what to do with it; `Engine.request` makes one from text or ids and options."""

    prompt: tuple[int, ...]
    max_new_tokens: int = MAX_NEW_TOKENS
    plan: DepthPlan
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    logprobs: int | None = None
    """Return log-probabilities of each token and of the likeliest `logprobs` tokens; None: none."""

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("seed", self.seed)
        texts = all(isinstance(text, str) for text in self.stop)
        require(texts, "stop", f"{self.stop!r} is not text", "Give token ids as stop_tokens.")
        require(all(self.stop), "stop", "a stop string is empty", "Omit it.")

    def check(self, config: ModelConfig) -> Request:
        """This request; ConfigError if a model with this configuration cannot take it."""
        check_prompt(self.prompt, config.vocab_size, config.context_length)
        if config.architecture == "transformer":
            fits = self.plan.loops == 1 and self.plan.exit is None
            require(fits, "loops", "a Transformer has no loop", "Omit loops and exit.")
        for token in self.stop_tokens:
            check_whole("stop_tokens", token, 0, config.vocab_size - 1)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, config.vocab_size))
        return self


def check_prompt(prompt: Sequence[int], vocab_size: int, context_length: int) -> list[int]:
    """The ids of a prompt as a list; ConfigError if there are none, if they are not ids of this
    vocabulary, or if they do not fit in the context."""
    tokens = as_ids("prompt", prompt)
    require(
        len(tokens) > 0,
        "prompt",
        "it is empty",
        "Give at least one token, such as the tokenizer's BOS.",
    )
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    require(
        not wrong,
        "prompt",
        f"id {wrong[:1]} is outside the vocabulary of {vocab_size}",
        "Was the text encoded with this model's tokenizer?",
    )
    problem = f"{len(tokens)} tokens, but the model's context holds {context_length}"
    require(len(tokens) <= context_length, "prompt", problem, "Shorten the prompt.")
    return tokens


def as_ids(key: str, tokens: object) -> list[int]:
    """Token ids as a list of int; ConfigError if they are not whole numbers."""
    iterable = isinstance(tokens, Iterable)
    require(iterable, key, f"{tokens!r} is not a list of ids", "Give a list, or text.")
    return [_as_id(key, token) for token in tokens]  # type: ignore[union-attr]


def _as_id(key: str, token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{key}: {token!r} is not an id. Give whole numbers.") from None


def check_whole(
    key: str, value: object, minimum: int | None = None, maximum: int | None = None
) -> int:
    """`value` as an int; ConfigError if it is not a whole number in the range."""
    whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    require(whole, key, f"{value!r} is not a whole number", "Give one, such as 8.")
    number = operator.index(value)  # type: ignore[arg-type]
    require_range(key, number, at_least=minimum, at_most=maximum)
    return number
