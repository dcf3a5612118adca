"""Runs of a sweep as Slurm jobs, one each, through submitit.

A job that nears its time limit or is preempted saves and is put into the queue again; so does one
whose node is lost, from its last checkpoint. What Slurm says now comes from `squeue`, which every
cluster has; what a run came to, from its files.
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
from typing import Any

from parcae.config import ConfigError, require
from parcae.files import FileError
from parcae.schema import Settings, setting
from parcae.sweeps.launch import ATTEMPTS, Job, failure, start_process
from parcae.sweeps.run_state import outcome_of

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_SAVE = 120
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig(Settings, table="slurm"):
    """What one run asks of the cluster."""

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
    """What a job executes: the run as a child process, asked to save when the job must end."""

    def __init__(self, job: Job, processes: int) -> None:
        self.job, self.processes = job, processes
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        code = 0
        for _ in range(ATTEMPTS):
            self._process = start_process(self.job, processes=self.processes)
            # Not wait(): the signal that calls `checkpoint` would find its lock taken.
            while (found := self._process.poll()) is None:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            code = found
            if code >= 0:
                break
        problem = failure(self.job, code)
        stage = outcome_of(self.job.run).stage
        if problem is not None or stage != "finished":
            raise RuntimeError(problem or f"the run is {stage}")
        return stage

    def checkpoint(self) -> Any:
        """Called by submitit before a time limit or a preemption; what it returns is queued."""
        import submitit

        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._process.pid, signal.SIGTERM)
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(SlurmRun(self.job, self.processes))


def check_slurm() -> None:
    """Before anything is prepared."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--slurm: submitit is not installed. Run: pip install 'parcae[cluster]'"
        ) from None
    require(
        shutil.which("sbatch") is not None and shutil.which("srun") is not None,
        "--slurm",
        "there is no sbatch here",
        "Use a machine of the cluster, or leave --slurm away to run on this one.",
    )


def submit(job: Job, config: SlurmConfig, folder: Path) -> str:
    """The number Slurm gives the job; submitit's own files go to `folder`."""
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
        job_name=job.name,
        time=config.minutes,
        ntasks_per_node=1,
        signal_delay_s=SECONDS_TO_SAVE,
        stderr_to_stdout=True,
        additional_parameters={"requeue": True},
        **{name: value for name, value in optional.items() if value is not None},
    )
    try:
        return executor.submit(SlurmRun(job, max(1, config.gpus))).job_id
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        words = str(error).strip().splitlines()
        raise FileError(f"sbatch refused {job.name}: {words[-1] if words else error}") from None


def job_states() -> dict[str, str]:
    """By job number, `queued` or `running`, of all jobs of this user that have not ended."""
    command = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %T"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise FileError(f"squeue does not answer ({found.stderr.strip()}). Try again later.")
    pairs = (line.split() for line in found.stdout.splitlines() if line.strip())
    return {number: "queued" if state in QUEUED else "running" for number, state in pairs}
