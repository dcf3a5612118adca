"""Train, study and run looped language models that are stable by construction.

    import parcae

    model = parcae.create("parcae-10m")              # any name in parcae.PRESETS
    model(tokens, depths=8).logits                   # the same weights, looped 8 times
    model(tokens, targets=targets, depths=[2, 9]).loss.backward()
    parcae.save(model, "folder")
    parcae.load("folder")                            # or a run, or a checkpoint of a run
    parcae.generate(model, ids, new_tokens=64)       # or parcae.Engine(model, tokenizer)
    laws = parcae.fit("runs.csv")                    # scaling laws of a table of runs
    parcae.predict(laws, flops=1e19)                 # loops and tokens for a training budget

Heavy modules are imported when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parcae.config import ConfigError, Curriculum, LoopConfig, ModelConfig
    from parcae.files import FileError
    from parcae.infer.engine import Engine
    from parcae.infer.generate import generate
    from parcae.laws.analysis import fit
    from parcae.laws.predict import predict
    from parcae.model import create
    from parcae.model.depth import Depths
    from parcae.model.store import save
    from parcae.presets import PRESETS, preset
    from parcae.runs import load, open_checkpoint

__all__ = [
    "PRESETS",
    "ConfigError",
    "Curriculum",
    "Depths",
    "Engine",
    "FileError",
    "LoopConfig",
    "ModelConfig",
    "create",
    "fit",
    "generate",
    "load",
    "open_checkpoint",
    "predict",
    "preset",
    "save",
]

_HOME = {
    "PRESETS": "presets",
    "ConfigError": "config",
    "Curriculum": "config",
    "Depths": "model.depth",
    "Engine": "infer.engine",
    "FileError": "files",
    "LoopConfig": "config",
    "ModelConfig": "config",
    "create": "model",
    "fit": "laws.analysis",
    "generate": "infer.generate",
    "load": "runs",
    "open_checkpoint": "runs",
    "predict": "laws.predict",
    "preset": "presets",
    "save": "model.store",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"parcae.{_HOME[name]}"), name)
    raise AttributeError(f"module 'parcae' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
