"""One request being served: its tokens, and what has become of them."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from parcae.data.tokenizer import Tokenizer
from parcae.infer.request import Completion, Finish, Piece, Request, TokenLogprob
from parcae.infer.sampling import BrokenLogits, likeliest, pick
from parcae.infer.text import TextStream


class Sequence:
    def __init__(self, request: Request, tokenizer: Tokenizer | None, context: int) -> None:
        self.request, self.context = request, context
        self.tokens = list(request.prompt)
        self.row = -1
        self.computed = 0
        """Tokens whose keys and values are in the cache, at full depth."""
        self.reused = self.drafted = self.accepted = 0
        self.loops: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None
        self.error: BrokenLogits | None = None
        """Why it ended, where the model had nothing to say; others go on."""
        self.state: Tensor | None = None
        """Where the last token's loop ended [d_h], for starts that want it."""
        self.pieces: deque[Piece] = deque()
        """Not yet handed to whoever streams."""
        self._stream = None if tokenizer is None else TextStream(tokenizer, request.stop)
        self._text: list[str] = []

    @property
    def made(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def room(self) -> int:
        """How many more tokens may follow."""
        last = min(len(self.request.prompt) + self.request.new_tokens, self.context + 1)
        return last - len(self.tokens)

    def choose(self, logits: np.ndarray, ahead: tuple[int, ...] = ()) -> int:
        """The token after those there are and those a draft has put ahead."""
        request, seen = self.request, self.tokens
        if ahead:
            seen = [*self.tokens, *ahead]
        try:
            if request.sampling.is_greedy:
                return likeliest(logits)
            given = torch.from_numpy(logits)
            return pick(given, request.sampling, request.seed, len(seen), seen)
        except BrokenLogits as error:
            self.error, self.finish = error, "error"
            return 0

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def accept(self, token: int, loops: int, logits: np.ndarray) -> None:
        """One more token, predicted from all there were; it may be the last."""
        if self.error is not None:
            return
        self.computed = len(self.tokens)
        if token in self.request.stop_tokens:
            self._end("stop", None, loops)
            return
        self.tokens.append(token)
        self.loops.append(loops)
        if self.request.logprobs is not None:
            self.logprobs.append(_logprob(token, logits, self.request.logprobs))
        text = "" if self._stream is None else self._stream.push(token)
        self._text.append(text)
        if self._stream is not None and self._stream.stopped:
            self._end("stop", token, loops, text)
        elif self.made == self.request.new_tokens:
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
            if self._stream.stopped:  # what was held back may have been the end of a stop string
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
    chances = torch.from_numpy(logits).double().log_softmax(-1)
    best = torch.topk(chances, alternatives)
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(chances[token]), pairs)
