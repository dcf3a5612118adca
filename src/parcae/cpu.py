"""Settings of the process that make training on a CPU faster."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_HEAP_BLOCK = 32 << 20  # glibc takes no higher threshold


def keep_freed_memory() -> bool:
    """Ask the C library to keep what is freed instead of handing it back to the system.

    A training step frees gigabytes and takes them again; handed back in between, every page is
    faulted in and zeroed once more. Costs nothing but that memory stays with the process. Returns
    False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = {
        M_MMAP_THRESHOLD: LARGEST_HEAP_BLOCK,
        M_TRIM_THRESHOLD: 2**31 - 1,
        M_TOP_PAD: 64 << 20,
    }
    return all(mallopt(name, value) == 1 for name, value in settings.items())
