"""Free memory within the limits of control groups, and freed memory that is kept."""

from __future__ import annotations

import platform
import subprocess
import sys

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
