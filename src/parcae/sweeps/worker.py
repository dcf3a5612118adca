"""One run of a sweep in its own process, which becomes `parcae train`: from the recipe, or with
--resume if the run's folder holds a started run.

    python -m parcae.sweeps.worker PARENT PROCESSES RECIPE.toml RUN MODULE [OPTION...]

Imports little: torch is loaded only once the process has been replaced.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parcae.files import FileError, InUseError, lock_folder
from parcae.machine import end_with_parent, ignore_signal
from parcae.runs import FINAL_STATUSES, read_status

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RunRequest:
    """A run to start: its recipe, its run folder, and the file for its output."""

    name: str
    recipe: Path
    run: Path
    log: Path
    options: tuple[str, ...] = ()
    """More options of `parcae train`."""


def command(request: RunRequest, processes: int = 1) -> list[str]:
    """The command line that a launcher starts as its child process."""
    numbers = [str(os.getpid()), str(processes)]
    arguments = [*numbers, str(request.recipe), str(request.run), *request.options]
    return [sys.executable, "-m", "parcae.sweeps.worker", *arguments]


def main(argv: Sequence[str]) -> None:
    parent, processes = int(argv[0]), int(argv[1])
    recipe, run = Path(argv[2]), Path(argv[3])
    _end_with(parent)
    # Slurm sends its warning of a time limit to every process of a job; the launcher handles it.
    ignore_signal("SIGUSR2")
    try:
        wait_until_free(run)
    except FileError as error:
        sys.exit(f"parcae: {error}")
    status = read_status(run)
    if status in FINAL_STATUSES:
        return
    new = status == "new"
    training = [str(recipe), "--out", str(run)] if new else ["--resume", str(run)]
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    arguments = ["-m", *(torchrun if processes > 1 else []), "parcae", "train", *training]
    os.execv(sys.executable, [sys.executable, *arguments, *argv[4:]])  # noqa: S606 (this Python, no shell)


def wait_until_free(run: Path) -> None:
    """Wait for a run that is still stopping: the runs of a killed sweep save before they end."""
    while True:
        try:
            with lock_folder(run):
                return
        except InUseError as error:
            print(f"waiting: {error}", flush=True)
            time.sleep(POLL_SECONDS)


def _end_with(parent: int) -> None:
    """Receive SIGTERM when the launcher dies, even if it is killed (Linux only)."""
    end_with_parent()
    if os.getppid() != parent:
        sys.exit("the sweep ended before this run started")


if __name__ == "__main__":
    main(sys.argv[1:])
