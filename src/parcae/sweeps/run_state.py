"""How far a run of a sweep has come, from the files in its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from parcae.runs import read_result
from parcae.runs.layout import METRICS_FILE

Stage = Literal["new", "begun", "interrupted", "diverged", "finished"]


@dataclass(frozen=True)
class Outcome:
    stage: Stage
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """Nothing is left to do: going on would not change it."""
        return self.stage in ("finished", "diverged")


def outcome_of(run: Path) -> Outcome:
    result = read_result(run)
    if result is not None:
        return Outcome(result["status"], result)
    return Outcome("begun" if (run / METRICS_FILE).exists() else "new")
