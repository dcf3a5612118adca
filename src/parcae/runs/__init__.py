"""The run folder: file names, checkpoints, results. The only package that knows what is in one.

layout        names of files and folders
checkpoints   list, choose (newest, best), verify; state.json
loading       from a path to a model and its tokenizer
records       recipe.toml, metrics.jsonl, result.json (`TrainResult`); the status of a run
"""

from parcae.runs.checkpoints import (
    best_checkpoint,
    find_checkpoint,
    list_checkpoints,
    read_state,
    verify_checkpoint,
    weights_checksum,
)
from parcae.runs.layout import find_run, run_of
from parcae.runs.loading import Checkpoint, find_tokenizer, load, open_checkpoint, task_of_run
from parcae.runs.records import (
    FINAL_STATUSES,
    TrainResult,
    last_step,
    read_metrics,
    read_recipe_table,
    read_result,
    read_status,
)

__all__ = [
    "FINAL_STATUSES",
    "Checkpoint",
    "TrainResult",
    "best_checkpoint",
    "find_checkpoint",
    "find_run",
    "find_tokenizer",
    "last_step",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "read_metrics",
    "read_recipe_table",
    "read_result",
    "read_state",
    "read_status",
    "run_of",
    "task_of_run",
    "verify_checkpoint",
    "weights_checksum",
]
