"""The name of the CPU, for records of measurements."""

from __future__ import annotations

import platform
from pathlib import Path


def machine_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
