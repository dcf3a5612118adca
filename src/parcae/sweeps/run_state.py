"""How far a run of a sweep has come, from the files in its folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from parcae.files import read_json
from parcae.training.folder import RESULT_FILE
from parcae.training.log import METRICS_FILE

Stage = Literal["new", "begun", "interrupted", "diverged", "finished"]
TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    stage: Stage
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """Nothing is left to do: going on would not change it."""
        return self.stage in ("finished", "diverged")


def outcome_of(run: Path) -> Outcome:
    if (run / RESULT_FILE).exists():
        result = read_json(run / RESULT_FILE)
        return Outcome(result["status"], result)
    return Outcome("begun" if (run / METRICS_FILE).exists() else "new")


def steps_behind(run: Path) -> int:
    """Optimiser steps that a run has logged; 0 before the first."""
    try:
        with (run / METRICS_FILE).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # being written right now
    return 0
