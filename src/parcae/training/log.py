"""Where measurements go: metrics.jsonl, the trackers a recipe names, and the terminal.

Each line of metrics.jsonl is an object with `kind` and `step`; kinds are train, telemetry,
validation and event. Lines that a killed run wrote after its last checkpoint are removed when it
resumes. Numbers that are not finite become null, since JSON cannot express them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from rich.progress import ProgressColumn, Task, TextColumn
from rich.text import Text

from parcae import console
from parcae.config import ConfigError
from parcae.files import (
    FileError,
    nan_to_none,
    no_link,
    read_lines,
    read_text,
    write_all,
    write_text,
    writing,
)
from parcae.recipe import flatten
from parcae.runs.layout import METRICS_FILE, TENSORBOARD_FOLDER, TRACKING_ID_FILE

logger = logging.getLogger("parcae.training")


class Tracker(Protocol):
    def log(self, numbers: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Log:
    """Appends to metrics.jsonl and to the trackers; only the first process has one."""

    def __init__(self, folder: Path, step: int = 0, trackers: Sequence[Tracker] = ()) -> None:
        self.path = folder / METRICS_FILE
        self.trackers = list(trackers)
        if self.path.exists():
            keep_until(self.path, step)
        with writing(self.path):
            self._stream: IO[bytes] = open(self.path, "ab", 0, opener=no_link)  # noqa: SIM115

    def write(self, kind: str, step: int, **values: Any) -> None:
        line = json.dumps({"kind": kind, "step": step, **nan_to_none(values)}, allow_nan=False)
        try:
            write_all(self._stream, f"{line}\n".encode())
        except OSError as error:
            raise FileError(
                f"{self.path}: cannot be written ({error.strerror}). Free some space, then "
                "continue with --resume: the last checkpoint is complete."
            ) from None
        numbers = dict(flat(values, kind))
        for tracker in list(self.trackers):
            try:
                tracker.log(numbers, step)
            except Exception as error:  # a tracker that fails must not end the run
                self.trackers.remove(tracker)
                warnings.warn(
                    f"{type(tracker).__name__} failed and is no longer used: {error}", stacklevel=2
                )

    def close(self) -> None:
        self._stream.close()
        for tracker in self.trackers:
            tracker.close()


def keep_until(path: Path, step: int) -> None:
    """Remove the lines after `step`, and a last line that was cut off."""
    kept = []
    for line in read_lines(path):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= step:
                kept.append(line.decode().rstrip("\n") + "\n")
    write_text(path, "".join(kept))


def flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, float]]:
    """`("train/lr/muon", 0.008)` for every number in the tree; lists and text are omitted."""
    return [
        (name, float(value))
        for name, value in flatten(values, f"{prefix}/", "/").items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


class TensorBoard:
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A resumed run keeps its id; names may be shared by runs, ids are not."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project="parcae",
            name=name,
            id=_identity(folder),
            dir=str(folder),
            resume="allow",
            config=dict(config),
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _identity(folder: Path) -> str:
    """A random id, stored in the run folder."""
    path = folder / TRACKING_ID_FILE
    if not path.exists():
        write_text(path, secrets.token_hex(8))
    return read_text(path, largest=1000)


class Trackio:
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._tracker = trackio
        unique = f"{name}-{_identity(folder)}"  # it identifies runs by name
        trackio.init(project="parcae", name=unique, resume="allow", config=dict(config))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(numbers), step=step)

    def close(self) -> None:
        self._tracker.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def open_trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], step: int = 0
) -> list[Tracker]:
    """The trackers by name; what was logged after `step` is dropped where the tracker can do so."""
    trackers: list[Tracker] = []
    for name in names:
        try:
            trackers.append(TRACKERS[name](folder, folder.resolve().name, config, step))
        except ImportError as error:
            for tracker in trackers:
                tracker.close()
            raise ConfigError(
                f"run.trackers: {name} is not installed ({error}). Run: pip install -e '.[track]'"
            ) from None
    return trackers


class TimeLeft(ProgressColumn):
    """The remaining time, from the share of the run that is done."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text(
            "" if left is None else f"{console.format_duration(round(left))} left", style="cyan"
        )


class Display(console.LiveProgress):
    """A progress bar on a terminal, a line every 10 s elsewhere; shown by the first process.

    Every line also goes to the logger `parcae.training`.
    """

    def __init__(self, is_first: bool, verbose: bool = True) -> None:
        shown = is_first and verbose
        super().__init__(TimeLeft(), TextColumn("[bold]{task.fields[numbers]}"), shown=shown)
        self._is_first = is_first
        self._printed = -console.SECONDS_BETWEEN_LINES
        self._task = self._progress.add_task("training", total=1.0, numbers="")

    def print(self, message: str) -> None:
        """Print a line; a terminal that was closed must not end the run before it is saved."""
        if self._is_first:
            logger.info(message)
        try:
            super().print(message)
        except OSError:
            self.shown = False

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            super().__exit__(*error)

    def update(
        self, step: int, progress: float, seconds: float, numbers: Mapping[str, Any]
    ) -> None:
        """Show the numbers of a step; `progress` from 0 to 1 is the share of the run done."""
        if not self._is_first:
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
        now = time.monotonic()
        if now > self._printed + console.SECONDS_BETWEEN_LINES or progress >= 1:
            self._printed = now
            eta = "" if left is None else f"  {console.format_duration(round(left))} left"
            line = f"step {step}  {progress:4.0%}{eta}  {text}"
            logger.info(line) if self._live else self.print(line)
