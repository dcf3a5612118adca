"""From what a person names to a scorer: a model of ours, a run, or a model of Hugging Face's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from parcae.config import require
from parcae.evaluate.foreign import ForeignScorer
from parcae.evaluate.ours import LoopedScorer
from parcae.evaluate.scoring import Scorer
from parcae.files import read_json
from parcae.infer.checkpoint import open_checkpoint
from parcae.model.release import is_release
from parcae.model.store import CONFIG_FILE, FORMAT


def open_scorer(
    name: str | Path,
    depths: Sequence[int] | None = None,
    *,
    state: Literal["zero", "like-init"] = "zero",
    tokenizer: str | Path | None = None,
    best: bool = False,
    batch_tokens: int | None = None,
    device: str | torch.device = "cpu",
) -> Scorer:
    if is_foreign(name):
        require(
            not depths or tuple(depths) == (1,), "loops", "this model has no loop", "Leave it out."
        )
        options = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
        scorer = ForeignScorer.open(str(name), device, **options)
        scorer.identity = fingerprint(scorer.model)
        return scorer
    model, words, folder = open_checkpoint(name, tokenizer, best)
    return LoopedScorer(
        model.to(device),
        words,
        depths,
        name=str(folder),
        identity=f"{fingerprint(model)} {words.sha256}",
        state=state,
        batch_tokens=batch_tokens,
    )


def is_foreign(name: str | Path) -> bool:
    """A name such as owner/model where no such folder is, or a folder of another library."""
    path = Path(name)
    if not path.exists():
        return isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/"))
    if not (path / CONFIG_FILE).is_file():
        return False
    config = read_json(path / CONFIG_FILE)
    ours = isinstance(config, dict) and (config.get("format") == FORMAT or is_release(config))
    return not ours


def fingerprint(model: nn.Module) -> str:
    """Of all weights, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
