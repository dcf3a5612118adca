"""A Slurm cluster of one node, for a test: own ports, own keys, gone when the test ends.

Needs root, since slurmd starts jobs as whoever submits them (Debian: slurm-wlm, munge).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("sbatch", "scancel", "srun", "slurmctld", "slurmd", "munged")
START_SECONDS = 30


def missing() -> str | None:
    """Why there can be no cluster here."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)} here (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "a cluster of one's own needs root"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `sbatch` and its relatives talk to a new cluster."""
    host, munge = socket.gethostname().split(".")[0], folder / "munge"
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o600)
    control, node = _free_ports(2)
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": control,
        "SlurmdPort": node,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={munge / 'socket'}",
        "SlurmUser": "root",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "ReturnToService": 2,
        "SelectType": "select/cons_tres",
        "SchedulerParameters": "sched_interval=2,bf_interval=2",  # seconds; by default a minute
        "MailProg": "/bin/true",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=1000 State=UNKNOWN",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
    files |= {"log-file": "log", "seed-file": "seed"}
    with ExitStack() as stack:
        for command in (
            ["munged", "--foreground", "--force"]
            + [f"--{option}={munge / name}" for option, name in files.items()],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            log = stack.enter_context((folder / f"{command[0]}.log").open("w"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(_stop, process)
            time.sleep(1)
        _wait_until_idle(environment)
        yield environment


def _wait_until_idle(environment: dict[str, str]) -> None:
    end = time.monotonic() + START_SECONDS
    command = ["sinfo", "--noheader", "--format=%T"]
    while time.monotonic() < end:
        state = subprocess.run(command, env=environment, capture_output=True, text=True)
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    raise TimeoutError(f"the cluster did not start: {state.stdout}{state.stderr}")


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
