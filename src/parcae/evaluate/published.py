"""Scores others have published, where the folder of evaluation data holds them.

Task            , Accuracy  , Centered
arc_easy        , 0.412458  , 0.216611
CORE            ,           , 0.113891
"""

from __future__ import annotations

import csv
from pathlib import Path

from parcae.evaluate.tasks import FOLDERS
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


def published_scores(folder: Path) -> dict[str, Scores]:
    """By model, smallest first; what cannot be read is left out."""
    found = {}
    for file, name in NAMES.items():
        paths = (folder / place.lstrip("/") / f"{file}.csv" for place in PLACES)
        if path := next((path for path in paths if path.is_file()), None):
            found[name] = _read(path)
    return found


def _read(path: Path) -> Scores:
    scores: Scores = {}
    with reading(path), path.open(encoding="utf-8", newline="") as stream:
        for row in csv.reader(stream):
            try:
                scores[row[0].strip()] = float(row[2])
            except (IndexError, ValueError):  # the header, or a line that is not a score
                continue
    return scores
