"""The suite `val`: a run's own held-out rows, or the texts of a file for a model without a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from math import isfinite
from typing import Any

import torch

from parcae.config import ConfigError
from parcae.data.loader import Batch
from parcae.data.readers import read_documents
from parcae.data.sources import find_files
from parcae.evaluation.job import DataFile
from parcae.evaluation.loss import losses_by_depth
from parcae.evaluation.perplexity import RunningText
from parcae.evaluation.scorer import LoopedScorer
from parcae.evaluation.scoring import Scorer
from parcae.evaluation.suites import TextSuite
from parcae.files import FileError
from parcae.runs import run_of
from parcae.runs.layout import RECIPE_FILE
from parcae.training.corpora import open_corpora
from parcae.training.folder import read_recipe

BATCH_ROWS = 8
REMEDY = "Name a file of held-out texts by --val-data."


def measure_held_out(checkpoint: str, limit: int | None, scorer: Scorer) -> dict[str, Any]:
    """As training validates: the rows that the run's recipe holds out, or the first `limit`."""
    run = run_of(checkpoint)
    has_recipe = run is not None and (run / RECIPE_FILE).exists()
    if run is None or not has_recipe or not isinstance(scorer, LoopedScorer):
        raise ConfigError(f"val: {checkpoint} is not a run, so nothing was held out. {REMEDY}")
    recipe = read_recipe(run)
    if limit is not None:
        recipe = replace(recipe, run=replace(recipe.run, validation_rows=limit))
    corpora = open_corpora(recipe, run)
    if not corpora.can_validate(recipe):
        raise FileError(f"{run}: its data holds out less than one row. {REMEDY}")
    rows = 0

    def batches() -> Iterator[Batch]:
        nonlocal rows
        for batch in corpora.validation(recipe, BATCH_ROWS):
            rows += len(batch[0])
            yield batch

    measured = losses_by_depth(
        scorer.model,
        batches(),
        scorer.depths,
        corpora.bytes_of_token(),
        "like-init" if scorer.draws_state else "zero",
        generator=torch.Generator(scorer.model.device).manual_seed(0),
    )
    return {
        "rows": rows,
        "by_loops": {
            str(depth): {name: _plain(value) for name, value in asdict(found).items()}
            for depth, found in measured.items()
        },
    }


def open_held_out(path: str, limit: int | None, scorer: Scorer) -> TextSuite:
    """Every document of a file, or the first `limit`, window by window."""
    files = find_files([path])
    if len(files) != 1:
        raise ConfigError(f"val-data: {path} is {len(files)} files. Name one.")
    texts = [one.text for one in islice(read_documents(files), limit)]
    source = DataFile(files[0].path, "held out")
    return TextSuite(RunningText("val", texts, texts, source, scorer))


def _plain(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
