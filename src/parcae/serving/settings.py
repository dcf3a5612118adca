"""Limits and sizes of a server. Each is an option of `parcae serve`."""

from __future__ import annotations

from dataclasses import dataclass

from parcae.schema import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """Limits hold per model, except those of a request."""

    max_batch_size: int = setting(64, "texts decoded together; others wait", at_least=1)
    prefill_tokens: int = setting(
        256, "prompt tokens read between two tokens of the texts being decoded", at_least=1
    )
    cache_gib: float | None = setting(
        None,
        "largest key-value cache of a model, in GiB (default: half of the free memory for all)",
        above=0,
    )
    max_waiting: int = setting(128, "texts that may wait; more are refused with 429", at_least=1)
    max_loops: int | None = setting(
        None,
        "largest num_loops (default: 16, or twice the mean of training if that is more)",
        at_least=1,
    )
    max_prompt_tokens: int | None = setting(
        None, "longest prompt, in tokens (default: the model's context)", at_least=1
    )
    max_new_tokens: int | None = setting(
        None, "largest max_tokens (default: the model's context)", at_least=1
    )
    max_choices: int = setting(16, "texts per request: prompts times n", at_least=1)
    max_body_bytes: int = setting(1 << 20, "largest body of a request, in bytes", at_least=1024)
    queue_seconds: float = setting(
        60.0, "longest wait in the queue, in seconds; then the answer is 429", above=0
    )
    request_seconds: float = setting(
        600.0, "longest time of a request, in seconds; then the answer is 504", above=0
    )
    drain_seconds: float = setting(
        30.0, "time to finish texts after SIGTERM, in seconds", at_least=0
    )

    def check(self) -> None:
        self.require(
            self.max_choices <= self.max_waiting,
            "max_choices",
            f"{self.max_choices} texts of a request do not fit in a queue of {self.max_waiting}",
            "Raise max_waiting or lower max_choices.",
        )
