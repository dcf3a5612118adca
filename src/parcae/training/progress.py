"""The progress display of a training run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.progress import ProgressColumn, Task, TextColumn
from rich.text import Text

from parcae import console


class TimeLeft(ProgressColumn):
    """The remaining time, from the share of the run that is done."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text(
            "" if left is None else f"{console.format_duration(round(left))} left", style="cyan"
        )


class Display(console.LiveProgress):
    """A progress bar on a terminal, a line every 10 s elsewhere; shown by the first process."""

    def __init__(self, shown: bool) -> None:
        super().__init__(TimeLeft(), TextColumn("[bold]{task.fields[numbers]}"), shown=shown)
        self._printed = -console.SECONDS_BETWEEN_LINES
        self._task = self._progress.add_task("training", total=1.0, numbers="")

    def update(
        self, step: int, progress: float, seconds: float, numbers: Mapping[str, Any]
    ) -> None:
        """Show the numbers of a step; `progress` from 0 to 1 is the share of the run done."""
        if not self.shown:
            return
        left = seconds * (1 - progress) / progress if progress > 0 else None
        loss = numbers["loss"]
        text = (
            f"loss {loss:.3f}  |g| {numbers['gradient_norm']:.2f}  T {numbers['mean_depth']:.1f}  "
            f"{console.format_count(numbers['tokens_per_second'])} tok/s"
        )
        if numbers.get("peak_fraction") is not None:
            text += f"  {numbers['peak_fraction']:.0%} of peak"
        if self._live:
            self._progress.update(
                self._task, description=f"step {step}", completed=progress, numbers=text, left=left
            )
            return
        now = time.monotonic()
        if now > self._printed + console.SECONDS_BETWEEN_LINES or progress >= 1:
            self._printed = now
            eta = "" if left is None else f"  {console.format_duration(round(left))} left"
            self.print(f"step {step}  {progress:4.0%}{eta}  {text}")
