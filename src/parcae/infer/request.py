"""What a caller asks for and what comes back; a request that exists can be served."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parcae.config import ModelConfig, require
from parcae.infer.exit import ExitRule
from parcae.infer.extrapolate import EXTRAPOLATIONS, Extrapolation
from parcae.infer.plain import check_prompt
from parcae.infer.sampling import Sampling
from parcae.model.depth import check_depth

Start = Literal["zero", "previous"]
Finish = Literal["length", "context", "stop"]
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
        some = not isinstance(self.loops, int) or self.loops >= 1
        require(some, "loops", f"{self.loops} is not positive", "Use at least 1.")
        loops = check_depth(self.loops)
        remedy = f"Use 1 to {LARGEST_DEPTH}."
        require(loops <= LARGEST_DEPTH, "loops", f"{loops} is absurd", remedy)
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
            0 < self.draft_loops < loops,
            "draft_loops",
            f"{self.draft_loops} loops cannot draft for {loops}",
            "Use fewer than loops.",
        )
        fits = 1 <= self.draft_tokens <= 64
        require(fits, "draft_tokens", f"{self.draft_tokens} is out of range", "Use 1 to 64.")
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
        require(new_tokens >= 1, "new_tokens", f"{new_tokens} is not positive", "Use at least 1.")
        if config.architecture == "transformer":
            fits = plan.loops == 1 and plan.exit is None
            require(fits, "loops", "a Transformer has no loop", "Leave out loops and exit.")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        require(all(stops), "stop", "a stop string is empty", "Leave it out.")
        few = logprobs is None or 0 <= logprobs <= min(MOST_LOGPROBS, config.vocab_size)
        remedy = f"Use 0 to {MOST_LOGPROBS}."
        require(few, "logprobs", f"{logprobs} alternatives are out of range", remedy)
        return cls(
            prompt=tuple(tokens),
            new_tokens=new_tokens,
            plan=plan,
            sampling=sampling or Sampling(),
            seed=seed,
            stop_tokens=frozenset(stop_tokens),
            stop=stops,
            logprobs=logprobs,
        )


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
    text: str | None
    """None where the engine has no tokenizer."""
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
