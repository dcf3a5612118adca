"""The checkpoints of a run: listing, choosing, their state.json and its checksums.

The best checkpoint is the earliest one with the lowest validation loss at the mean number of loops
of training (`Trainer.deciding_loss`, saved as `validation_loss`), for reading as well as for
`run.keep_best`. state.json is the last file of a checkpoint: it has the sha256 of every other file
and one of its own contents, so that a changed bit anywhere is an error and never another model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parcae.files import FileError, flush, path_inside, read_json, sha256, write_json
from parcae.model import CONFIG_FILE
from parcae.runs.layout import (
    CHECKPOINTS_FOLDER,
    STATE_FILE,
    TOKENIZER_FILES,
    checkpoint_path,
    find_run,
    is_checkpoint_path,
    list_steps,
)

FORMAT = "parcae-training-1"
REMEDY = "Use another checkpoint of the run."


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
    if (path / CONFIG_FILE).exists():
        return path
    run = path.parent if path.name == CHECKPOINTS_FOLDER else path
    checkpoints = [step for step in list_checkpoints(run) if (step / CONFIG_FILE).exists()]
    if not checkpoints:
        find_run(path, f"a run, a checkpoint, or a model folder (with {CONFIG_FILE})")
        raise FileError(
            f"{path}: the run has no checkpoint yet. It writes one every run.checkpoint_every "
            "steps, and at its end."
        )
    return (best_checkpoint(checkpoints) if best else None) or checkpoints[-1]


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """What state.json says: step, data position, counters, validation losses, checksums."""
    path = Path(checkpoint) / STATE_FILE
    state = read_json(path)
    if not isinstance(state, dict):
        raise FileError(f"{path}: not a JSON object. {REMEDY}")
    return state


def last_state(run: str | Path) -> dict[str, Any] | None:
    """state.json of the newest checkpoint that can be read and names its recipe."""
    for checkpoint in reversed(list_checkpoints(run)):
        try:
            state = read_state(checkpoint)
        except FileError:
            continue
        if isinstance(state.get("recipe"), dict) and isinstance(state.get("sources"), list):
            return state
    return None


def _validation_loss(checkpoint: Path) -> float | None:
    try:
        loss = read_state(checkpoint).get("validation_loss")
    except FileError:
        return None
    return loss if isinstance(loss, int | float) else None


def write_state(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write state.json with the checksums of all files in `folder`, which are on disk afterwards.

    This is the last file of a checkpoint.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / STATE_FILE)
    for path in files:
        flush(path)
    checksums = {str(path.relative_to(folder)): sha256(path) for path in files}
    content = {"format": FORMAT, "step": step, **state, "files": checksums}
    write_json(folder / STATE_FILE, {**content, "sha256": _checksum(content)})
    flush(folder)


def verify_model_folder(folder: Path) -> None:
    """Verify a checkpoint of a run; a folder as `parcae.save` writes it has no checksums."""
    if (folder / STATE_FILE).exists() or is_checkpoint_path(folder):
        verify_checkpoint(folder)


def verify_checkpoint(folder: Path) -> None:
    """Raise FileError unless every file exists, and has the checksum it was written with."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise FileError(f"{path}: missing. {REMEDY}")
    state = read_json(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FileError(f"{path}: not a training checkpoint of this version. {REMEDY}")
    if state.pop("sha256", None) != _checksum(state):
        raise FileError(f"{path}: damaged, its checksum differs. {REMEDY}")
    checksums = state.get("files")
    if not isinstance(checksums, dict) or not checksums:
        raise FileError(f"{path}: damaged, it lists no files. {REMEDY}")
    read = {path.name for path in folder.glob("*.safetensors")}
    read |= {name for name in TOKENIZER_FILES if (folder / name).exists()}
    for name in sorted(read - checksums.keys()):
        raise FileError(f"{folder / name}: not a file of this checkpoint. Remove it.")
    for name, expected in checksums.items():
        file = path_inside(folder, name)
        if not file.is_file():
            raise FileError(f"{file}: missing. {REMEDY}")
        if sha256(file) != expected:
            raise FileError(f"{file}: damaged, its checksum differs. {REMEDY}")


def weights_checksum(folder: Path) -> str:
    """sha256 of the weights in a model folder: of their file, or of the digests of several.

    That of a run's checkpoint is read from its state.json, which `load` verifies.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if (folder / STATE_FILE).exists():
        recorded = read_state(folder).get("files")
        recorded = recorded if isinstance(recorded, dict) else {}
        digests = [str(recorded.get(path.name)) for path in files]
    else:
        digests = [sha256(path) for path in files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _checksum(state: Mapping[str, Any]) -> str:
    """Checksum of plain values, as they are read back from JSON."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
