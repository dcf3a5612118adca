"""Counters of a server and its models in Prometheus' text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from parcae.infer.request import Request
from parcae.infer.sequence import Piece

WINDOW_SECONDS = 10.0
"""The tokens per second are the mean of this time."""


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self) -> Iterable[tuple[str, Mapping[str, str], float]]:
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield "_bucket", {"le": str(bound)}, total
        yield "_sum", {}, self.sum
        yield "_count", {}, total


class Metrics:
    """Of one model. The scheduler's thread writes; others read."""

    def __init__(self) -> None:
        self.prompt_tokens = self.reused_tokens = self.tokens = self.loops = 0
        self.refused = self.retries = self.failures = 0
        self.batch_size = Histogram((1, 2, 4, 8, 16, 32, 64, 128))
        self.step_seconds = Histogram((0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3))
        self.first_token_seconds = Histogram((0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100))
        self._recent: deque[tuple[float, int]] = deque()

    def count_step(self, batch: int, seconds: float) -> None:
        self.batch_size.observe(batch)
        self.step_seconds.observe(seconds)

    def count_start(self, request: Request, reused: int, submitted: float) -> None:
        self.prompt_tokens += len(request.prompt)
        self.reused_tokens += reused
        self.first_token_seconds.observe(time.monotonic() - submitted)

    def count_tokens(self, pieces: Sequence[Piece]) -> None:
        loops = [piece.loops for piece in pieces if piece.token is not None]
        self.tokens += len(loops)
        self.loops += sum(loops)
        now = time.monotonic()
        self._recent.append((now, len(loops)))
        while self._recent[0][0] < now - WINDOW_SECONDS:
            self._recent.popleft()

    def tokens_per_second(self) -> float:
        since = time.monotonic() - WINDOW_SECONDS
        return sum(count for at, count in list(self._recent) if at >= since) / WINDOW_SECONDS

    def families(self) -> Iterable[tuple[str, str, str, float | Histogram]]:
        """Name, type, help and value of each metric."""
        counters = {
            "prompt_tokens": "Tokens of prompts whose text has begun.",
            "reused_tokens": "Those of them that were in the cache.",
            "tokens": "Generated tokens.",
            "loops": "Loops of generated tokens; divide by tokens for loops per token.",
            "refused": "Texts refused because the queue was full.",
            "retries": "Texts that ran again, alone, after an exception.",
            "failures": "Texts that ended with an error of the engine.",
        }
        for name, help in counters.items():
            yield f"{name}_total", "counter", help, getattr(self, name)
        yield "tokens_per_second", "gauge", "In the last 10 seconds.", self.tokens_per_second()
        yield "batch_size", "histogram", "Texts per step.", self.batch_size
        yield "step_seconds", "histogram", "Duration of steps.", self.step_seconds
        help = "Time from the request to its first token."
        yield "first_token_seconds", "histogram", help, self.first_token_seconds


class Exposition:
    """Collects samples and writes them grouped by metric, as the text format asks."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, help: str, value: float | Histogram, **labels: str) -> None:
        name = f"parcae_{name}"
        header = [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
        lines = self._families.setdefault(name, header)
        samples = value.samples() if isinstance(value, Histogram) else [("", {}, value)]
        for suffix, extra, number in samples:
            pairs = ",".join(
                f'{key}="{_escaped(text)}"' for key, text in {**labels, **extra}.items()
            )
            lines.append(f"{name}{suffix}{{{pairs}}} {number}")

    def add_requests(self, requests: Counter[tuple[str, int]]) -> None:
        for (path, status), count in sorted(requests.items()):
            help = "Answered requests."
            self.add("requests_total", "counter", help, count, path=path, status=str(status))

    def text(self) -> str:
        return "\n".join(line for lines in self._families.values() for line in lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
