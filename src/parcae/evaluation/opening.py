"""From what a person names to a scorer: a model of ours, a run, or a model of Hugging Face's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from parcae.config import ConfigError, require
from parcae.evaluation.hf_scorer import ForeignScorer, tokenizer_fingerprint
from parcae.evaluation.scorer import LoopedScorer
from parcae.evaluation.scoring import Scorer
from parcae.files import FileError, read_json
from parcae.model import CONFIG_FILE
from parcae.model.release import is_release
from parcae.model.store import FORMAT
from parcae.runs import open_checkpoint


def open_scorer(
    name: str | Path,
    depths: Sequence[int] | None = None,
    *,
    state: Literal["zero", "like-init"] = "zero",
    tokenizer: str | Path | None = None,
    best: bool = False,
    batch_tokens: int | None = None,
    context: int | None = None,
    device: str | torch.device = "cpu",
) -> Scorer:
    """`context`: tokens read at a time, where it is not to be as many as the model says."""
    least = "Use at least 2."
    require(context is None or context >= 2, "context", f"{context} is too few", least)
    _check_device(device)
    if is_foreign(name):
        loops = bool(depths) and tuple(depths or ()) != (1,)
        remedy = "Leave it out."
        require(not loops, "loops", "this model has no loop", remedy)
        require(state == "zero", "state", "this model has no loop to start", remedy)
        require(tokenizer is None, "tokenizer", "this model is read with its own", remedy)
        require(not best, "best", "this model is not a run", remedy)
        options = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
        scorer = ForeignScorer.open(str(name), device, context_length=context, **options)
        words = tokenizer_fingerprint(scorer.tokenizer)
        scorer.identity = f"{fingerprint(scorer.model)} {words}"
        return scorer
    if not Path(name).exists():
        raise FileError(
            f"{name}: no such folder. Give a model's folder, a run's, or one of its checkpoints; "
            "a model on the hub by its whole name, such as openai-community/gpt2."
        )
    model, words, folder = open_checkpoint(name, tokenizer, best)
    return LoopedScorer(
        model.to(device),
        words,
        depths,
        name=str(folder),
        identity=f"{fingerprint(model)} {words.sha256}",
        state=state,
        batch_tokens=batch_tokens,
        context=context,
    )


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).split("\n")[0]
        raise ConfigError(f"device: {device} cannot be used here ({first}). Use cpu.") from None


def is_foreign(name: str | Path) -> bool:
    """A name such as owner/model where no such folder is, or a folder of another library. Where
    there is a folder `owner`, a mistyped path is likelier."""
    path = Path(name)
    if not path.exists():
        is_name = isinstance(name, str) and name.count("/") == 1 and name[0] not in "./"
        return is_name and not path.parent.is_dir()
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
