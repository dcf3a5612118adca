"""How fast a stream of tokens comes, and how deep each of them went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from parcae.infer.request import Completion, Piece


class Meter:
    """Looks on while somebody else iterates:

    for piece in meter.watch(engine.stream("import ")): ...
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.tokens: list[int] = []
        self.loops: list[int] = []
        self.completion: Completion | None = None
        """None as long as the text may go on."""
        self.first: float | None = None
        """Seconds until the first token: reading the prompt, mostly."""
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
        """Tokens per second after the first; None where there is no second."""
        spent = 0.0 if self.first is None else self._last - self.first
        return (len(self.tokens) - 1) / spent if spent > 0 else None

    @property
    def mean_loops(self) -> float | None:
        return sum(self.loops) / len(self.loops) if self.loops else None
