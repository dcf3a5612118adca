"""What a person sees while a model trains: progress, time left, the numbers that matter."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.progress import ProgressColumn, Task, TextColumn
from rich.text import Text

from parcae import console


class TimeLeft(ProgressColumn):
    """From the share of the run that is done, which the clock may decide instead of the steps."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text(
            "" if left is None else f"{console.format_duration(round(left))} left", style="cyan"
        )


class Display(console.LiveProgress):
    """A bar on a terminal; elsewhere a line now and then. Only the first process shows one."""

    def __init__(self, shown: bool) -> None:
        super().__init__(TimeLeft(), TextColumn("[bold]{task.fields[numbers]}"), shown=shown)
        self._printed = -console.SECONDS_BETWEEN_LINES
        self._task = self._progress.add_task("training", total=1.0, numbers="")

    def update(self, step: int, done: float, seconds: float, numbers: Mapping[str, Any]) -> None:
        """`done` is the share of the run that lies behind."""
        if not self.shown:
            return
        left = seconds * (1 - done) / done if done > 0 else None
        loss = numbers["loss"]
        words = (
            f"loss {loss:.3f}  |g| {numbers['gradient_norm']:.2f}  T {numbers['mean_depth']:.1f}  "
            f"{console.format_count(numbers['tokens_per_second'])} tok/s"
        )
        if numbers.get("peak_fraction") is not None:
            words += f"  {numbers['peak_fraction']:.0%} of peak"
        if self._live:
            self._progress.update(
                self._task, description=f"step {step}", completed=done, numbers=words, left=left
            )
            return
        now = time.monotonic()
        if now > self._printed + console.SECONDS_BETWEEN_LINES or done >= 1:
            self._printed = now
            eta = "" if left is None else f"  {console.format_duration(round(left))} left"
            self.print(f"step {step}  {done:4.0%}{eta}  {words}")
