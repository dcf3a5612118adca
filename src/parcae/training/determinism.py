"""The same bits in every run of a recipe on a machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _settings

settings: Any = _settings  # its one attribute is made at run time


@contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """Compiled code with several threads needs to be told so. The caller's process gets back the
    mode it had."""
    if not wanted:
        yield
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
