"""Runs of a sweep as Slurm jobs, one job per run, through submitit.

Before its time limit, or when it is preempted, a job saves and is queued again; one whose node is
lost is queued again and continues from its last checkpoint. The state of a job comes from `squeue`,
which needs no accounting; the result of a run from its run folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parcae.config import ConfigError, require
from parcae.files import FileError
from parcae.runs import read_status
from parcae.schema import Settings, setting
from parcae.sweeps.launch import ATTEMPTS, failure, start_process
from parcae.sweeps.worker import RunRequest

POLL_SECONDS = 1.0
SECONDS_TO_SAVE = 120
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig(Settings, table="slurm"):
    """The resources that one run asks of the cluster."""

    partition: str | None = setting(None, "partition (unset: the cluster's default)")
    account: str | None = setting(None, "account that is charged (unset: the user's default)")
    qos: str | None = setting(None, "quality of service (unset: the cluster's default)")
    constraint: str | None = setting(None, "features that a node must have")
    minutes: int = setting(
        1440, "time limit of a job, minutes; a longer run continues in the next job", at_least=1
    )
    gpus: int = setting(0, "GPUs of one node that train a run together", at_least=0)
    cpus: int | None = setting(None, "CPUs of a job (unset: the cluster's default)", at_least=1)
    memory: str | None = setting(None, "memory of a job, such as 16G")
    jobs_at_limit: int = setting(
        100, "how often a run may be queued again at its time limit", at_least=0
    )


class SlurmRun:
    """The function of a Slurm job: the run as a child process that saves when the job must end."""

    def __init__(self, request: RunRequest, processes: int) -> None:
        self.request, self.processes = request, processes
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        code = 0
        for _ in range(ATTEMPTS):
            self._process = start_process(self.request, processes=self.processes)
            # Not wait(): the signal handler that calls `checkpoint` would find its lock taken.
            while (exit_code := self._process.poll()) is None:
                time.sleep(POLL_SECONDS)
            code = exit_code
            if code >= 0:
                break
        problem = failure(self.request, code)
        status = read_status(self.request.run)
        if problem is not None or status != "finished":
            raise RuntimeError(problem or f"the run is {status}")
        return status

    def checkpoint(self) -> Any:
        """Called by submitit before a time limit or a preemption; what it returns is queued."""
        import submitit

        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._process.pid, signal.SIGTERM)
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(SlurmRun(self.request, self.processes))


def check_slurm() -> None:
    """Raise ConfigError if this machine cannot submit jobs."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise ConfigError(
            "slurm: submitit is not installed. Run: pip install -e '.[cluster]'"
        ) from None
    require(
        shutil.which("sbatch") is not None and shutil.which("srun") is not None,
        "slurm",
        "sbatch is not installed here",
        "Run this on a machine of the cluster, or omit `slurm` to train here.",
    )


def submit(request: RunRequest, config: SlurmConfig, folder: Path) -> str:
    """Submit a run and return the id of its job; submitit keeps its own files in `folder`."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=config.jobs_at_limit)
    optional = {
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "cpus_per_task": config.cpus,
        "mem": config.memory,
        "gpus_per_node": config.gpus or None,
    }
    executor.update_parameters(
        job_name=request.name,
        time=config.minutes,
        ntasks_per_node=1,
        signal_delay_s=SECONDS_TO_SAVE,
        stderr_to_stdout=True,
        additional_parameters={"requeue": True},
        **{name: value for name, value in optional.items() if value is not None},
    )
    try:
        return executor.submit(SlurmRun(request, max(1, config.gpus))).job_id
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        lines = str(error).strip().splitlines()
        raise FileError(f"sbatch refused {request.name}: {lines[-1] if lines else error}") from None


def job_states() -> dict[str, Literal["queued", "running"]]:
    """By job id: the state of every job of this user that has not ended."""
    command = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %T"]
    squeue = subprocess.run(  # noqa: S603 (constants and a user id, no shell)
        command, capture_output=True, text=True, check=False
    )
    if squeue.returncode != 0:
        raise FileError(f"squeue failed ({squeue.stderr.strip()}). Try again later.")
    pairs = (line.split() for line in squeue.stdout.splitlines() if line.strip())
    return {job: "queued" if state in QUEUED else "running" for job, state in pairs}
