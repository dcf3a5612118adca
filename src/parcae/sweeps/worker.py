"""One run of a sweep in a process of its own: it becomes `parcae train`, from the beginning or
with --resume, whichever the run's folder calls for.

    python -m parcae.sweeps.worker PARENT PROCESSES RECIPE.toml RUN

Light on purpose: nothing heavy is imported before the process is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parcae.files import FileError, InUseError, exclusive
from parcae.sweeps.run_state import outcome_of
from parcae.training.log import METRICS_FILE

PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_LOOKS = 0.5


def command(recipe: Path, run: Path, processes: int = 1) -> list[str]:
    """What a launcher starts, as a child of its own."""
    words = [str(os.getpid()), str(processes), str(recipe), str(run)]
    return [sys.executable, "-m", "parcae.sweeps.worker", *words]


def main(argv: Sequence[str]) -> None:
    parent, processes, recipe, run = int(argv[0]), int(argv[1]), Path(argv[2]), Path(argv[3])
    _end_with(parent)
    # Slurm's warning of a time limit goes to every process of a job; the launcher deals with it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        wait_until_free(run)
    except FileError as error:
        sys.exit(f"parcae: {error}")
    if outcome_of(run).is_final:
        return
    goes_on = (run / METRICS_FILE).exists()
    training = ["--resume", str(run)] if goes_on else [str(recipe), "--out", str(run)]
    several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    words = ["-m", *(several if processes > 1 else []), "parcae", "train", *training]
    os.execv(sys.executable, [sys.executable, *words])


def wait_until_free(run: Path) -> None:
    """A killed sweep's runs are asked to save and end; that takes them a moment."""
    while True:
        try:
            with exclusive(run):
                return
        except InUseError as error:
            print(f"waiting: {error}", flush=True)
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _end_with(parent: int) -> None:
    """Be asked to stop, as by SIGTERM, when the launcher dies, even if it is killed (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the sweep has ended before its run began")


if __name__ == "__main__":
    main(sys.argv[1:])
