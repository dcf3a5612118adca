"""The names of files and folders in a run folder: the one module that defines them.

config.json, model.safetensors and shard-*.safetensors, the files of any model folder, are named in
`parcae.model`; tokenizer.json in `parcae.data`.

RUN/
    recipe.toml             every setting of the run, resolved
    tokenizer.json          the tokenizer of the data
    data/N/                 source N, tokenised for this run (absent where it was prepared before)
    metrics.jsonl           one JSON object per line: what was measured
    result.json             status, totals and final losses; written when training ends
    tracking-id, tensorboard/   for the experiment trackers a recipe names
    checkpoints/
        step-00000500/      one checkpoint; a model folder that `parcae.load` reads
            config.json, model.safetensors (or shard-*.safetensors)   the model
            optimiser/state.safetensors (or shard-*.safetensors)      the optimiser's state
            tokenizer.json
            state.json      step, data position, counters; sha256 of all the other files
        .step-00000500/     being written or deleted; never read
        damaged-step-00000500/   set aside because its checksums differ
    evaluation/, report/, depth.png     written by `parcae eval`, `report` and `depth`
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from parcae.data import TOKENIZER_FILE as TOKENIZER_FILE
from parcae.files import FileError

RECIPE_FILE = "recipe.toml"
TOKENIZER_FILES = (TOKENIZER_FILE, "merges.txt")
"""Files by which a folder with a tokenizer is recognised."""
DATA_FOLDER = "data"
METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"
TRACKING_ID_FILE = "tracking-id"
TENSORBOARD_FOLDER = "tensorboard"
EVALUATION_FOLDER = "evaluation"
REPORT_FOLDER = "report"
DEPTH_FIGURE = "depth.png"

CHECKPOINTS_FOLDER = "checkpoints"
WRITTEN = (
    ".lock",
    RECIPE_FILE,
    TOKENIZER_FILE,
    DATA_FOLDER,
    METRICS_FILE,
    RESULT_FILE,
    TRACKING_ID_FILE,
    TENSORBOARD_FOLDER,
    "wandb",
    CHECKPOINTS_FOLDER,
)
"""What training writes and deletes in a run folder."""

STATE_FILE = "state.json"
OPTIMISER_FOLDER = "optimiser"
OPTIMISER_FILE = "state.safetensors"
_STEP = "step-"


def shard_folders(run: Path, sources: Iterable[str | Path]) -> list[Path]:
    """The folder of shards of each source of a recipe: itself, if it is one, or one in the run."""
    from parcae.data.shards import MANIFEST

    return [
        Path(source) if (Path(source) / MANIFEST).exists() else run / DATA_FOLDER / str(number)
        for number, source in enumerate(sources)
    ]


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of a complete checkpoint."""
    return run / CHECKPOINTS_FOLDER / f"{_STEP}{step:08d}"


def hidden_path(run: Path, step: int) -> Path:
    """The folder of a checkpoint while it is written or deleted."""
    return run / CHECKPOINTS_FOLDER / f".{_STEP}{step:08d}"


def damaged_path(run: Path, step: int) -> Path:
    """The folder a damaged checkpoint is renamed to."""
    return run / CHECKPOINTS_FOLDER / f"damaged-{_STEP}{step:08d}"


def hidden_checkpoints(run: Path) -> list[Path]:
    """What processes that were killed left while they wrote or deleted checkpoints."""
    return sorted((run / CHECKPOINTS_FOLDER).glob(f".{_STEP}*"))


def list_steps(run: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    paths = (run / CHECKPOINTS_FOLDER).glob(f"{_STEP}*")
    return sorted(step_of(path) for path in paths if path.name.removeprefix(_STEP).isdecimal())


def is_checkpoint_path(folder: Path) -> bool:
    """Whether the path is that of a complete checkpoint of a run."""
    folder = folder.absolute()
    name = folder.name.removeprefix(_STEP)
    return folder.parent.name == CHECKPOINTS_FOLDER and name != folder.name and name.isdecimal()


def step_of(checkpoint: Path) -> int:
    """The optimiser step that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix(_STEP))


def find_run(path: str | Path, expected: str = "a folder that `parcae train` has written") -> Path:
    """The path itself, if it is a run; a FileError that asks for what is `expected` otherwise."""
    path = Path(path)
    if (path / RECIPE_FILE).is_file():
        return path
    if path.is_file():
        problem = "a file, not a folder"
    elif not path.is_dir():
        problem = "no such folder"
    elif (run := run_of(path)) is not None:
        problem = f"not a run, but a part of {run}"
    elif runs := sorted(path.glob(f"*/{RECIPE_FILE}")):
        problem = f"not a run, but a folder with runs such as {runs[0].parent}"
    else:
        problem = f"not a run: {RECIPE_FILE} is missing"
    raise FileError(f"{path}: {problem}. Give {expected}.")


def run_of(path: str | Path) -> Path | None:
    """The run that `path` is, or that it is a checkpoint of; None for any other folder.

    A relative path gives a relative path.
    """
    path = Path(path)
    if (path / RECIPE_FILE).exists():
        return path
    absolute = path.absolute()
    if absolute.name == CHECKPOINTS_FOLDER:
        run = absolute.parent
    elif absolute.parent.name == CHECKPOINTS_FOLDER:
        run = absolute.parent.parent
    else:
        return None
    return run if path.is_absolute() else Path(os.path.relpath(run))
