"""The share of right answers of a model of a synthetic task, by number of loops and by level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from parcae.data.synthetic import HELD_OUT, Task
from parcae.model.base import LanguageModel


@torch.no_grad()
def accuracies(
    model: LanguageModel, task: Task, loops: Sequence[int], rows: int = 512
) -> dict[int, dict[int, float]]:
    """The share of right answers by number of loops, then by level, on `rows` held-out rows."""
    examples = task.draw(rows, np.random.default_rng((HELD_OUT, 1)), every_level=True)
    inputs, targets = examples.batch()
    levels = torch.from_numpy(examples.levels)
    right: dict[int, torch.Tensor] = {}
    for depth, x in model.readings(inputs, loops, state="zero"):
        right[depth] = model.logits(x).argmax(-1) == targets
    return {
        depth: {level: correct[levels == level].float().mean().item() for level in task.levels}
        for depth, correct in right.items()
    }
