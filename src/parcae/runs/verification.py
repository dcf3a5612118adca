"""Checksums of a checkpoint: written with it, and verified whenever it is loaded.

state.json is the last file of a checkpoint. It has the sha256 of every other file and one of its
own contents, so that a changed bit anywhere is an error and never another model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcae.files import FileError, flush, read_json, sha256, write_json
from parcae.runs.layout import STATE_FILE, TOKENIZER_FILES, is_checkpoint_path

FORMAT = "parcae-training-1"
REMEDY = "Use another checkpoint of the run."


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
        if not (folder / name).is_file():
            raise FileError(f"{folder / name}: missing. {REMEDY}")
        if sha256(folder / name) != expected:
            raise FileError(f"{folder / name}: damaged, its checksum differs. {REMEDY}")


def _checksum(state: Mapping[str, Any]) -> str:
    """Of plain values, as they are read back from JSON."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
