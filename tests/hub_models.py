"""Models of this package and the same weights in transformers."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conftest import KINDS, randomised
from parcae.config import LoopConfig, ModelConfig
from parcae.hub import modeling_parcae
from parcae.hub.modeling_parcae import ParcaeForCausalLM
from parcae.hub.remote_code import remote_code
from parcae.model.base import LanguageModel
from parcae.model.hf_format import to_hf_config, to_hf_weights


@cache
def modelling_file() -> ModuleType:
    """The modelling file of an exported folder, imported as transformers does."""
    folder = Path(tempfile.mkdtemp(prefix="modelling_"))
    for name, text in {"__init__.py": "", **remote_code()}.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module(f"{folder.name}.modeling_parcae")
    finally:
        sys.path.remove(str(folder.parent))
        shutil.rmtree(folder)


def in_transformers(
    model: LanguageModel, source: ModuleType = modeling_parcae, **changes
) -> ParcaeForCausalLM:
    """The model with the same weights, by the classes of this package or of a modelling file."""
    settings = {**to_hf_config(model.config), "pad_token_id": 0, **changes}
    other = source.ParcaeForCausalLM(source.ParcaeConfig(**settings)).eval()
    weights = to_hf_weights(model.state_dict(), model.config)
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    other.tie_weights()
    other.generation_config.pad_token_id = 0
    return other


def random_tokens(rows: int, length: int, vocabulary: int = 96, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (rows, length), generator=generator)


@pytest.fixture(scope="session")
def ours() -> LanguageModel:
    return randomised(KINDS["parcae"]).eval()


@pytest.fixture(scope="session")
def theirs(ours: LanguageModel) -> ParcaeForCausalLM:
    return in_transformers(ours)


TRANSFORMER = ModelConfig(
    architecture="transformer",
    vocab_size=96,
    context_length=32,
    width=48,
    heads=3,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    injection="none",
    readout=False,
    prelude_norm=False,
    loop=LoopConfig(mean_loops=1, sampler="fixed"),
)
