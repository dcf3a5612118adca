"""From a path to a model: the one place where weights are read for use.

A path is a model folder (config.json and weights, as `parcae.save` writes them, or the reference
release's), a run, or RUN/checkpoints/step-N.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parcae.config import require
from parcae.device import find_device
from parcae.files import FileError, interpreting
from parcae.runs.checkpoints import find_checkpoint, verify_model_folder
from parcae.runs.layout import RECIPE_FILE, TOKENIZER_FILE, TOKENIZER_FILES, run_of
from parcae.runs.records import naming_imports, read_recipe_table

if TYPE_CHECKING:
    import torch

    from parcae.data.synthetic import Task
    from parcae.data.tokenizer import Tokenizer
    from parcae.model.base import LanguageModel


class Checkpoint(NamedTuple):
    """A model, its tokenizer, and the folder the weights were read from."""

    model: LanguageModel
    tokenizer: Tokenizer
    folder: Path


def load(
    path: str | Path, *, best: bool = False, device: str | torch.device = "cpu"
) -> LanguageModel:
    """The model of a model folder, a run or a checkpoint, in evaluation mode.

    `best`: of a run's checkpoints the one with the lowest validation loss instead of the newest.
    `device`: where its weights are put; "auto" is CUDA where it is available, else the CPU.
    Every file of a run's checkpoint is verified: one that differs from its recorded checksum raises
    FileError. No code from a file is run.
    """
    from parcae.model.store import read_model

    folder = find_checkpoint(path, best)
    verify_model_folder(folder)
    with naming_imports(folder):
        return read_model(folder, find_device(device))


def open_checkpoint(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    best: bool = False,
    device: str | torch.device = "cpu",
) -> Checkpoint:
    """A model with its tokenizer: `tokenizer`, or else the one beside the weights or in the run.

    `path`, `best` and `device` are those of `load`.
    """
    from parcae.data.tokenizer import Tokenizer
    from parcae.model.store import read_model

    folder = find_checkpoint(path, best)
    verify_model_folder(folder)
    encoder = Tokenizer.load(find_tokenizer(folder) if tokenizer is None else tokenizer)
    with naming_imports(folder):
        model = read_model(folder, find_device(device))
    entries, vocabulary = encoder.vocab_size, model.config.vocab_size
    require(
        entries <= vocabulary,
        "tokenizer",
        f"{entries:,} entries, but the model in {folder} has a vocabulary of {vocabulary:,}",
        "Give the tokenizer it was trained with, with `tokenizer`.",
    )
    return Checkpoint(model, encoder, folder)


def task_of_run(folder: str | Path) -> Task | None:
    """The synthetic task that the run of a checkpoint trains; None for texts and other folders."""
    run = run_of(folder)
    if run is None or not (run / RECIPE_FILE).exists():
        return None
    from parcae.data.synthetic import task_of

    with interpreting(run / RECIPE_FILE, "Was it edited?"):
        return task_of(read_recipe_table(run)["data"]["sources"])


def find_tokenizer(folder: str | Path) -> Path:
    """The folder with the tokenizer: that of the weights, or the run they are a checkpoint of."""
    folder = Path(folder)
    for candidate in filter(None, (folder, run_of(folder))):
        if any((candidate / name).exists() for name in TOKENIZER_FILES):
            return candidate
    raise FileError(f"{folder}: no {TOKENIZER_FILE} in this folder. Give one with `tokenizer`.")
