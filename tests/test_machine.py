"""Free memory within the limits of control groups, freed memory that is kept, spinning threads."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from types import ModuleType

import pytest

from parcae import machine

# Straight from the C library: a small block that lands above the large ones would pin them in
# either case, and whether one does is chance.
PAGE_FAULTS = """
import ctypes, resource
from parcae.machine import keep_freed_memory
{setting}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    blocks = [libc.malloc(16 << 20) for _ in range(20)]
    for block in blocks: ctypes.memset(block, 1, 16 << 20)
    for block in reversed(blocks): libc.free(ctypes.c_void_p(block))
for _ in range(3): step()
before = faults()
for _ in range(5): step()
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept():
    def measure(setting: str) -> int:
        command = [sys.executable, "-c", PAGE_FAULTS.format(setting=setting)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert measure("assert keep_freed_memory()") < measure("") / 3


def write_group(folder, names, limit, used, cached):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, used, f"anon 5\n{names[3]} {cached}"), strict=False):
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("lines", "top", "names"),
    [
        (
            "0::/slurm/job_7/step_0",
            "",
            ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ),
        (
            "5:cpu:/\n4:hugetlb,memory:/slurm/job_7/step_0\n0::/",
            "memory",
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "memory.stat",
                "total_inactive_file",
            ),
        ),
    ],
)
def test_a_limit_of_any_control_group_above_holds(lines, top, names, tmp_path, monkeypatch):
    groups = tmp_path / "cgroup"
    (tmp_path / "self").write_text(lines)
    monkeypatch.setattr(machine, "CONTROL_GROUP", groups)
    monkeypatch.setattr(machine, "PROCESS_GROUPS", tmp_path / "self")
    assert machine._container_memory() is None
    job = groups / top / "slurm" / "job_7"
    write_group(job / "step_0", names, "max", 10, 0)
    assert machine._container_memory() is None
    write_group(job, names, 1000, 400, 150)
    assert machine._container_memory() == 750
    write_group(groups / top, names, 10_000, 9_500, 0)
    assert machine._container_memory() == 500
    assert machine.available_memory("cpu") == 500


# All threads share one core, so a thread that spins keeps it from the one it waits for.
SHARED_CORE = """
import json, os, statistics, threading, time, torch
from parcae.machine import SpinLimiter
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
x = torch.ones(1 << 18)
def milliseconds():
    times = []
    for _ in range(7):
        start = time.perf_counter()
        torch.neg(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3
spinning, limited, deadline = milliseconds(), None, time.monotonic() + 20
with SpinLimiter() as limiter, SpinLimiter() as inner:
    while not limiter.limited and time.monotonic() < deadline:
        torch.neg(x)
    if limiter.limited:
        limited = milliseconds()
    assert not inner.limited
afterwards, deadline = milliseconds(), time.monotonic() + 20
while limited and afterwards < 3 * limited and time.monotonic() < deadline:  # threads end late
    afterwards = milliseconds()
print(json.dumps([spinning, limited, afterwards, threading.active_count()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or machine.cores() < 2, reason="needs Linux, two cores")
def test_threads_without_a_core_of_their_own_stop_spinning():
    ignored = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    command = [sys.executable, "-c", SHARED_CORE]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    spinning, limited, afterwards, threads = json.loads(answer.stdout)
    assert limited < spinning / 3
    assert limited < afterwards / 3
    assert threads == 1


def test_what_the_user_has_chosen_about_waiting_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with machine.SpinLimiter() as limiter:
        assert limiter._thread is None


def test_without_scheduler_statistics_nothing_is_limited(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "seconds_without_core", lambda: None)
    with machine.SpinLimiter() as limiter:
        assert limiter._thread is None


def test_no_idle_team_while_pytorch_is_being_imported(monkeypatch):
    """Another thread imports it; on a busy machine that takes seconds."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert machine._IdleTeam.start_if_useful() is None


def test_more_files_may_be_open_if_the_system_allows_it():
    resource = pytest.importorskip("resource")
    code = (
        "import resource; from parcae.machine import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (50, 80))\n"
        "print(allow_open_files(40), allow_open_files(70), allow_open_files(90),"
        " *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.split() == ["40", "70", "80", "80", "80"], answer.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 80
