"""The memory setting does what it says where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, torch
from parcae.cpu import keep_freed_memory
{setting}
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step(): [torch.ones(4 << 20) for _ in range(20)]
step()
before = faults()
for _ in range(20): step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept():
    def measure(setting: str) -> int:
        command = [sys.executable, "-c", PAGE_FAULTS.format(setting=setting)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert measure("assert keep_freed_memory()") < measure("") / 3
