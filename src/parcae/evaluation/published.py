"""Scores others have published, where the folder of evaluation data holds them.

Task            , Accuracy  , Centered
arc_easy        , 0.412458  , 0.216611
CORE            ,           , 0.113891
"""

from __future__ import annotations

from pathlib import Path

from parcae.evaluation.tasks import FOLDERS, Baselines, core
from parcae.files import reading

PLACES = tuple(f"{folder}/{below}" for folder in FOLDERS for below in ("", "meta"))
NAMES = {
    "openai-community-gpt2": "GPT-2",
    "openai-community-gpt2-medium": "GPT-2 medium",
    "openai-community-gpt2-large": "GPT-2 large",
    "openai-community-gpt2-xl": "GPT-2 XL",
}

Scores = dict[str, float]
"""Centred, by task; CORE is their mean."""


def published_scores(folder: Path, baselines: Baselines = "nanochat") -> dict[str, Scores]:
    """By model, smallest first; what cannot be read is left out. The files' own scores are centred
    by nanochat's baselines; for others they are centred anew, so that what stands side by side can
    be compared."""
    found = {}
    for file, name in NAMES.items():
        paths = (folder / place.lstrip("/") / f"{file}.csv" for place in PLACES)
        if path := next((path for path in paths if path.is_file()), None):
            accuracies, scores = _read(path, 1), _read(path, 2)
            found[name] = scores if baselines == "nanochat" else _centred(accuracies, baselines)
    return found


def _centred(accuracies: Scores, baselines: Baselines) -> Scores:
    tasks = [task for task in core() if task.name in accuracies]
    scores = {task.name: task.centred(accuracies[task.name], baselines) for task in tasks}
    if len(tasks) == len(core()):
        scores["CORE"] = sum(scores.values()) / len(scores)
    return scores


def _read(path: Path, column: int) -> Scores:
    scores: Scores = {}
    with reading(path):
        text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        words = line.split(",")
        try:
            scores[words[0].strip()] = float(words[column])
        except (IndexError, ValueError):  # the header, or a line that is not a score
            continue
    return scores
