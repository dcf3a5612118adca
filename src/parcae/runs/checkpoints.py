"""The checkpoints of a run: listing, choosing, and reading their state.json.

The best checkpoint is the earliest one with the lowest validation loss, for reading as well as for
`run.keep_best`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parcae.files import FileError, read_json
from parcae.model import CONFIG_FILE
from parcae.runs.layout import (
    CHECKPOINTS_FOLDER,
    RECIPE_FILE,
    STATE_FILE,
    checkpoint_path,
    list_steps,
)


def list_checkpoints(run: str | Path) -> list[Path]:
    """The folders of a run's complete checkpoints, oldest first.

    A checkpoint gets its name when all its files are written, so none of these is incomplete.
    """
    run = Path(run)
    return [checkpoint_path(run, step) for step in list_steps(run)]


def best_checkpoint(checkpoints: Sequence[Path]) -> Path | None:
    """The one with the lowest validation loss, the first of equals; None if none has a loss."""
    losses = {path: loss for path in checkpoints if (loss := _validation_loss(path)) is not None}
    return min(losses, key=losses.__getitem__) if losses else None


def find_checkpoint(path: str | Path, best: bool = False) -> Path:
    """The folder with the weights that `path` stands for.

    A model folder or a checkpoint stands for itself, a run for its newest checkpoint, or with
    `best` for the one with the lowest validation loss (the newest if none was validated).
    """
    path = Path(path)
    if not path.is_dir():
        raise FileError(f"{path}: no such folder. Give a model folder, a run or a checkpoint.")
    if (path / CONFIG_FILE).exists():
        return path
    run = path.parent if path.name == CHECKPOINTS_FOLDER else path
    checkpoints = [step for step in list_checkpoints(run) if (step / CONFIG_FILE).exists()]
    if not checkpoints and (path / RECIPE_FILE).exists():
        raise FileError(
            f"{path}: the run has no checkpoint yet. It writes one every run.checkpoint_every "
            "steps, and at its end."
        )
    if not checkpoints:
        raise FileError(
            f"{path}: neither a model ({CONFIG_FILE}) nor a run ({CHECKPOINTS_FOLDER}/step-*). "
            "Check the path."
        )
    return (best_checkpoint(checkpoints) if best else None) or checkpoints[-1]


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """What state.json says: step, data position, counters, validation losses, checksums."""
    path = Path(checkpoint) / STATE_FILE
    state = read_json(path)
    if not isinstance(state, dict):
        raise FileError(f"{path}: not a JSON object. Use another checkpoint of the run.")
    return state


def _validation_loss(checkpoint: Path) -> float | None:
    try:
        return read_state(checkpoint).get("validation_loss")
    except FileError:
        return None
