"""What a caller asks for and what comes back; a request that exists can be served."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, SupportsIndex

from parcae.config import ModelConfig, require
from parcae.infer.exit import ExitRule
from parcae.infer.extrapolate import EXTRAPOLATIONS, Extrapolation
from parcae.infer.plain import check_prompt
from parcae.infer.sampling import Sampling

Start = Literal["zero", "previous"]
Finish = Literal["length", "context", "stop", "error"]
LARGEST_DEPTH = 1024
MOST_LOGPROBS = 100


@dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """How a sequence loops. Two sequences may share what they computed if these are equal."""

    loops: int
    exit: ExitRule | None = None
    """When a token may stop before `loops`."""
    start: Start = "zero"
    """Where the state of a generated token begins: at zero, or where its predecessor ended."""
    extrapolation: Extrapolation = "none"
    draft_loops: int = 0
    """Loops of a speculative draft; 0 does not speculate."""
    draft_tokens: int = 4
    """Tokens drafted before they are verified."""

    def __post_init__(self) -> None:
        check_whole("loops", self.loops, 1, LARGEST_DEPTH)
        check_whole("draft_loops", self.draft_loops, 0, LARGEST_DEPTH)
        known = self.start in ("zero", "previous")
        require(known, "start", f"{self.start!r} is not an option", "Use zero or previous.")
        require(
            self.extrapolation in EXTRAPOLATIONS,
            "extrapolation",
            f"{self.extrapolation!r} is not an option",
            f"Use one of {', '.join(EXTRAPOLATIONS)}.",
        )
        if not self.draft_loops:
            return
        require(
            self.draft_loops < self.loops,
            "draft_loops",
            f"{self.draft_loops} loops cannot draft for {self.loops}",
            "Use fewer than loops.",
        )
        check_whole("draft_tokens", self.draft_tokens, 1, 64)
        require(
            self.exit is None and self.start == "zero" and self.extrapolation == "none",
            "draft_loops",
            "speculation goes with plain loops only",
            "Leave out exit, start and extrapolation, or the draft.",
        )

    @property
    def generates_as_it_reads(self) -> bool:
        """Whether a generated token leaves the same cache as the same token in a prompt."""
        return self.exit is None and self.start == "zero"


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: tuple[int, ...]
    new_tokens: int
    plan: DepthPlan
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    logprobs: int | None = None
    """None: none. k: of every token, and of the k likeliest tokens beside it."""

    @classmethod
    def checked(
        cls,
        config: ModelConfig,
        prompt: Sequence[int],
        *,
        new_tokens: int = 128,
        plan: DepthPlan,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop_tokens: Collection[int] = (),
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Request:
        """Everything that could go wrong later is refused now."""
        tokens = check_prompt(prompt, config.vocab_size)
        limit = config.context_length
        require(
            len(tokens) <= limit,
            "prompt",
            f"{len(tokens)} tokens, but the model's context holds {limit}",
            "Shorten the prompt.",
        )
        check_whole("new_tokens", new_tokens, 1)
        check_whole("seed", seed)
        if config.architecture == "transformer":
            fits = plan.loops == 1 and plan.exit is None
            require(fits, "loops", "a Transformer has no loop", "Leave out loops and exit.")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        texts = all(isinstance(one, str) for one in stops)
        require(texts, "stop", f"{stop!r} is not text", "Ids belong to stop_tokens.")
        require(all(stops), "stop", "a stop string is empty", "Leave it out.")
        if logprobs is not None:
            check_whole("logprobs", logprobs, 0, min(MOST_LOGPROBS, config.vocab_size))
        return cls(
            prompt=tuple(tokens),
            new_tokens=new_tokens,
            plan=plan,
            sampling=sampling or Sampling(),
            seed=seed,
            stop_tokens=_check_stop_tokens(stop_tokens, config.vocab_size),
            stop=stops,
            logprobs=logprobs,
        )


def _check_stop_tokens(tokens: object, vocab_size: int) -> frozenset[int]:
    some = isinstance(tokens, Iterable)
    require(some, "stop_tokens", f"{tokens!r} is not a list", "Give a list of ids.")
    ids = [check_whole("stop_tokens", token, 0, vocab_size - 1) for token in tokens]  # type: ignore
    return frozenset(ids)


def check_whole(key: str, value: object, least: float = -math.inf, most: float = math.inf) -> int:
    whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    require(whole, key, f"{value!r} is not a whole number", "Give one, such as 8.")
    remedy = f"Use {least} to {most}." if most < math.inf else f"Use at least {least}."
    number = operator.index(value)  # type: ignore[arg-type]
    require(least <= number <= most, key, f"{number} is out of range", remedy)
    return number


@dataclass(frozen=True)
class TokenLogprob:
    """Under the model's own distribution, before temperature and filters."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """What followed a prompt."""

    tokens: tuple[int, ...]
    """All that were made. A stop token is not among them; the tokens that spelled a stop string
    are, so these may say more than `text`."""
    text: str | None
    """Up to a stop string. None where the engine has no tokenizer."""
    finish: Finish
    """`length`: new_tokens were made; `context`: the model's context is full; `stop`: it ended."""
    loops: tuple[int, ...]
    """How often each new token's predecessor looped to predict it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    reused: int = 0
    """Tokens of the prompt that had been computed before."""
    drafted: int = 0
    accepted: int = 0
    """Of the tokens drafted, those that full depth agreed with."""


@dataclass(frozen=True)
class Piece:
    """One step of a stream."""

    token: int | None
    text: str
    loops: int
    completion: Completion | None = None
    """With the last piece."""
