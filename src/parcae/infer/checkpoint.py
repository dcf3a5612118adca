"""From a path to a model and its tokenizer: what a person names is not always the folder of both.

    a model's folder        config.json and weights, as `parcae.save` writes them
    a run's folder          its newest checkpoint, or the one that validated best
    RUN/checkpoints/step-N  that one

The tokenizer is the one beside the weights, or the run's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from parcae.config import require
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, read_json
from parcae.model.frame import LanguageModel
from parcae.model.store import CONFIG_FILE, STATE_FILE, load

CHECKPOINTS = "checkpoints"
TOKENIZER_FILES = ("tokenizer.json", "merges.txt")


class Opened(NamedTuple):
    model: LanguageModel
    tokenizer: Tokenizer
    folder: Path
    """Where the weights came from."""


def open_checkpoint(
    path: str | Path, tokenizer: str | Path | None = None, best: bool = False
) -> Opened:
    """`best`: of a run's checkpoints the one with the lowest validation loss, not the newest."""
    folder = find_model(path, best)
    words = Tokenizer.load(find_tokenizer(folder) if tokenizer is None else tokenizer)
    model = load(folder)
    entries, room = words.vocab_size, model.config.vocab_size
    require(
        entries <= room,
        "tokenizer",
        f"{entries:,} entries, but the model in {folder} knows {room:,}",
        "Give the one it was trained with, by --tokenizer.",
    )
    return Opened(model, words, folder)


def find_model(path: str | Path, best: bool = False) -> Path:
    """The folder of the weights that `path` stands for."""
    path = Path(path)
    if not path.is_dir():
        raise FileError(
            f"{path}: no such folder. Give a model's folder, a run's, or one of its checkpoints."
        )
    if (path / CONFIG_FILE).exists():
        return path
    steps = _checkpoints(path if path.name == CHECKPOINTS else path / CHECKPOINTS)
    if not steps and (path / "recipe.toml").exists():
        raise FileError(
            f"{path}: the run has no checkpoint yet. It writes one every run.checkpoint_every "
            "steps, and at its end."
        )
    if not steps:
        raise FileError(
            f"{path}: neither a model ({CONFIG_FILE}) nor a run ({CHECKPOINTS}/step-*). "
            "Check the path."
        )
    return min(reversed(steps), key=_validation_loss) if best else steps[-1]


def find_tokenizer(folder: Path) -> Path:
    """The folder that has it: that of the weights, or of the run they are a checkpoint of."""
    places = [folder]
    if folder.absolute().parent.name == CHECKPOINTS:
        places.append(folder.absolute().parent.parent)
    for place in places:
        if any((place / name).exists() for name in TOKENIZER_FILES):
            return place
    raise FileError(f"{folder}: no tokenizer.json beside the model. Name one by --tokenizer.")


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest first. A folder takes its name when all of it is written, so these are whole."""
    named = (path for path in folder.glob("step-*") if (path / CONFIG_FILE).exists())
    numbered = [path for path in named if path.name.removeprefix("step-").isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("step-")))


def _validation_loss(checkpoint: Path) -> float:
    try:
        loss = read_json(checkpoint / STATE_FILE).get("validation_loss")
    except FileError:
        return math.inf
    return math.inf if loss is None else loss
