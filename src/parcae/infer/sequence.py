"""A request while it is decoded: its tokens, their text, and what is returned for it.

TextStream        ids to text, whole characters only, without stop strings
RunningSequence   the state of one request in the engine
Piece             one step of a stream
Completion        the result
Meter             speed and depth of a stream
"""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from parcae.data.tokenizer import Tokenizer
from parcae.infer.request import Request
from parcae.infer.sampling import (
    NoiseFunction,
    NonFiniteLogits,
    draw_rows,
    likeliest,
    noise,
    non_finite_logits,
    penalise,
    pick,
)

Finish = Literal["length", "context", "stop", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Under the model's own distribution, before temperature and filters."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt."""

    tokens: tuple[int, ...]
    """All generated tokens, without a stop token. They include the tokens of a stop string, so
    they may spell more than `text`."""
    text: str | None
    """The text up to a stop string. None if the engine has no tokenizer."""
    finish: Finish
    """`length`: max_new_tokens are generated; `context`: the context is full; `stop`: a stop token
    or stop string appeared; `cancelled`: by `Engine.cancel`."""
    loops: tuple[int, ...]
    """For each token, the loops of the token it was predicted from."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    reused: int = 0
    """Tokens of the prompt that were in the cache already."""
    drafted: int = 0
    accepted: int = 0
    """Drafted tokens that full depth agreed with."""


@dataclass(frozen=True)
class Piece:
    """One step of a stream."""

    token: int | None
    text: str
    loops: int
    completion: Completion | None = None
    """Set in the last piece."""


class TextStream:
    """Decodes ids one at a time: `push` returns the text that is certain, `finish` the rest.

    A character whose bytes are spread over several tokens is returned with the last of them. Text
    that may be the start of a stop string is held back until that is decided. The stop string that
    is complete first ends the text, the longest if several are; so the result does not depend on
    how the text is split into tokens.

    Byte-level tokens are decoded here, because `DecodeStream` of `tokenizers` also holds back text
    after bytes that are not UTF-8, which would detect a stop string a token later.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()
    ) -> None:
        """`after`: ids the text continues, on which a space before its first word may depend."""
        self._bytes = tokenizer.token_bytes if tokenizer.is_byte_level else None
        self._decode = None if tokenizer.is_byte_level else tokenizer.decode_stream(after[-1:])
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held_back = ""
        self.stopped = False
        """Whether a stop string has appeared; it and all text after it are dropped."""

    def push(self, token: int) -> str:
        if self._bytes is None:
            assert self._decode is not None
            return self._release(self._decode(token))
        # A model's vocabulary may be larger than its tokenizer's.
        token_bytes = self._bytes[token] if token < len(self._bytes) else b""
        return self._release(self._decoder.decode(token_bytes))

    def finish(self) -> str:
        text = self._release(self._decoder.decode(b"", final=True))
        rest, self._held_back = self._held_back, ""
        return text if self.stopped else text + rest

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held_back + text
        starts = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if matches:
            self.stopped, self._held_back = True, ""
            return text[: min(matches)[1]]
        count = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held_back = text[len(text) - count :]
        return text[: len(text) - count]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class RunningSequence:
    """A request in the engine; `Engine.submit` returns it. `finish` is set when it has ended, then
    `completion()` is the result; until then `pieces` has the tokens not yet taken from it."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        context: int,
        noise: NoiseFunction = noise,
    ) -> None:
        self.request, self.context, self.noise = request, context, noise
        self.tokens = list(request.prompt)
        self.row = -1
        self.computed = 0
        """Tokens at the beginning whose keys and values are in the cache at full depth."""
        self.reused = self.drafted = self.accepted = 0
        self.loops: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None
        self.error: Exception | None = None
        """Why the sequence failed, such as logits that are not finite; others continue."""
        self.pieces: deque[Piece] = deque()
        """Not yet taken by the caller of a stream."""
        self._stream = (
            None if tokenizer is None else TextStream(tokenizer, request.stop, request.prompt)
        )
        self._text: list[str] = []

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_reading(self) -> bool:
        """Whether the prompt has not been computed to its end."""
        return self.finish is None and self.computed < len(self.request.prompt)

    @property
    def room(self) -> int:
        """How many more tokens may follow."""
        last = min(len(self.request.prompt) + self.request.max_new_tokens, self.context + 1)
        return last - len(self.tokens)

    def choose(self, logits: np.ndarray, draft: tuple[int, ...] = ()) -> int:
        """The token that follows the tokens so far and those of a draft."""
        request, seen = self.request, self.tokens
        if draft:
            seen = [*self.tokens, *draft]
        try:
            if request.sampling.is_greedy:
                return likeliest(logits)
            tensor = torch.from_numpy(logits)
            return pick(tensor, request.sampling, request.seed, len(seen), seen, self.noise)
        except NonFiniteLogits as error:
            self.fail(error)
            return 0

    def fail(self, error: Exception) -> None:
        """End with an error, which `completion()` raises."""
        if self.finish is None:
            self.error, self.finish = error, "error"

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def accept(self, token: int, loops: int, logits: np.ndarray | None = None) -> None:
        """Append a token that was predicted from all tokens before it; it may be the last."""
        if self.error is not None:
            return
        self.computed = len(self.tokens)
        if token in self.request.stop_tokens:
            self._end("stop", None, loops)
            return
        self.tokens.append(token)
        self.loops.append(loops)
        if self.request.logprobs is not None and logits is not None:
            self.logprobs.append(_logprob(token, logits, self.request.logprobs))
        text = "" if self._stream is None else self._stream.push(token)
        self._text.append(text)
        if self._stream is not None and self._stream.stopped:
            self._end("stop", token, loops, text)
        elif self.generated == self.request.max_new_tokens:
            self._end("length", token, loops, text)
        elif self.room == 0:
            self._end("context", token, loops, text)
        else:
            self.pieces.append(Piece(token, text, loops))

    def _end(self, finish: Finish, token: int | None, loops: int, text: str = "") -> None:
        if self._stream is not None:
            rest = self._stream.finish()
            self._text.append(rest)
            text += rest
            if self._stream.stopped:  # the text held back may complete a stop string
                finish = "stop"
        self.finish = finish
        self.pieces.append(Piece(token, text, loops, self.completion()))

    def completion(self) -> Completion:
        self.check()
        assert self.finish is not None
        return Completion(
            tokens=tuple(self.tokens[len(self.request.prompt) :]),
            text=None if self._stream is None else "".join(self._text),
            finish=self.finish,
            loops=tuple(self.loops),
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs),
            reused=self.reused,
            drafted=self.drafted,
            accepted=self.accepted,
        )


def _logprob(token: int, logits: np.ndarray, alternatives: int) -> TokenLogprob:
    log_probs = torch.from_numpy(logits).double().log_softmax(-1)
    best = torch.topk(log_probs, alternatives)
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(log_probs[token]), pairs)


def choose_all(sequences: Sequence[RunningSequence], logits: Sequence[np.ndarray]) -> list[int]:
    """`choose` of each sequence with its logits; those that draw a token do so together."""
    drawing = [s for s in sequences if s.request.sampling.temperature > 0]
    drawn: dict[RunningSequence, int] = {}
    if len(drawing) > 1:
        rows = {s: torch.from_numpy(row) for s, row in zip(sequences, logits, strict=True)}
        samplings = [s.request.sampling for s in drawing]
        penalised = [penalise(rows[s], s.tokens, s.request.sampling) for s in drawing]
        noises = [s.noise(s.request.seed, len(s.tokens), len(rows[s])) for s in drawing]
        tokens = draw_rows(torch.stack(penalised), samplings, noises)
        for sequence, token in zip(drawing, tokens, strict=True):
            if token is None:
                sequence.fail(non_finite_logits())
            drawn[sequence] = token or 0
    pairs = zip(sequences, logits, strict=True)
    return [drawn[s] if s in drawn else s.choose(row) for s, row in pairs]


class Meter:
    """Measures a stream while the caller iterates over it:

    for piece in meter.watch(engine.stream("import ")): ...
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.tokens: list[int] = []
        self.loops: list[int] = []
        self.completion: Completion | None = None
        """None until the text has ended."""
        self.first: float | None = None
        """Seconds until the first token, mostly for reading the prompt."""
        self._last = 0.0

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        start = self._clock()
        for piece in pieces:
            now = self._clock() - start
            if piece.token is not None:
                self.first = now if self.first is None else self.first
                self._last = now
                self.tokens.append(piece.token)
                self.loops.append(piece.loops)
            self.completion = piece.completion
            yield piece

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first; None with fewer than two tokens."""
        seconds = 0.0 if self.first is None else self._last - self.first
        return (len(self.tokens) - 1) / seconds if seconds > 0 else None

    @property
    def mean_loops(self) -> float | None:
        return sum(self.loops) / len(self.loops) if self.loops else None
