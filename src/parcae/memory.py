"""How much memory a device has left."""

from __future__ import annotations

from pathlib import Path

import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can still be taken without swapping, or None where nobody can say."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    known = [size for size in (_machine(), _control_group()) if size is not None]
    return min(known, default=None)


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    words = fields.get("MemAvailable", "").split()
    return int(words[0]) * 1024 if words else None


def _control_group() -> int | None:
    """What a container may still take; files it has merely read are given up when asked."""
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
        stat = dict(row.split() for row in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - used + int(stat.get("inactive_file", 0)) if limit.isdigit() else None
