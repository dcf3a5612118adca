"""The memory setting does what it says where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
