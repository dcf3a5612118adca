"""The golden outputs: what they are made of, and the script that writes them.

    python tests/golden/outputs.py

Weights are functions of a generator's integer stream, the same on every machine, so they are not
stored. Everything stored is computed in float64: an implementation in float64 agrees to about
1e-13, one in float32 to the bound of `rounding`. Run the script when a change of the mathematics is
meant; where the outputs of the authors' release are at hand (`PARCAE_TEST_DATA`),
model/test_golden.py must pass at the same commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(FOLDER.parent), str(ROOT / "src"), str(ROOT / "benchmarks")]

import reference  # noqa: E402
from conftest import RDM  # noqa: E402
from parcae.config import LoopConfig, ModelConfig  # noqa: E402
from parcae.model import create  # noqa: E402
from parcae.model.base import LanguageModel  # noqa: E402
from parcae.model.depth import Depths  # noqa: E402
from parcae.training.optim import Optimiser  # noqa: E402
from parcae.training.schedule import Factors  # noqa: E402
from parcae.training.settings import OptimiserConfig  # noqa: E402
from training.runs import compute_in_float64  # noqa: E402

TENSORS, TOKENS = FOLDER / "outputs.safetensors", FOLDER / "tokens.json"
ROWS, POSITIONS, VOCABULARY = 4, 6, 24
LOOPS = (1, 2, 5)
DEPTHS = Depths((1, 3, 2, 5), (1, 2, 2, 2))
NEW_TOKENS = 8
OPTIMISERS = ("muon-adamw", "adamw", "adamw-atan2")
STEPS = 3


def shape(**changes) -> ModelConfig:
    settings = {
        "vocab_size": VOCABULARY,
        "context_length": 16,
        "width": 12,
        "heads": 2,
        "prelude_layers": 1,
        "core_layers": 1,
        "coda_layers": 1,
        "loop": LoopConfig(mean_loops=4),
    }
    return ModelConfig(**{**settings, **changes})


SWIGLU = {**RDM, "mlp_width": 20}
TRANSFORMER = {"architecture": "transformer", "injection": "none", "readout": False}
TRANSFORMER |= {"prelude_layers": 0, "core_layers": 2, "coda_layers": 0, "prelude_norm": False}
MODELS = {
    "parcae": shape(),
    "parcae-zoh": shape(discretisation="zoh"),
    "parcae-wide-state": shape(state_width=16, state_heads=2, core_layers=2),
    "parcae-grouped-heads": shape(heads=6, kv_heads=3),
    "parcae-no-prelude": shape(prelude_layers=0, coda_layers=0),
    "rdm": shape(**SWIGLU, norm="residual"),
    "rdm-prenorm": shape(**SWIGLU),
    "rdm-wide-state": shape(**{**SWIGLU, "readout": True}, state_width=16, state_heads=2),
    "addition": shape(**{**SWIGLU, "injection": "addition"}),
    "transformer": shape(**TRANSFORMER, loop=LoopConfig(mean_loops=1, sampler="fixed")),
}


class Stream:
    """Numbers that every machine makes alike: the generator's raw integers, exactly rounded."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.PCG64(seed)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """In [-1, 1), multiples of 2^-23: exact in float32."""
        integers = self._generator.random_raw(int(np.prod(shape, dtype=int))) >> np.uint64(40)
        values = integers.astype(np.float64) * 2.0**-23 - 1
        return torch.from_numpy(values).view(shape)

    def tokens(self, *shape: int) -> Tensor:
        integers = self._generator.random_raw(int(np.prod(shape))) >> np.uint64(33)
        return torch.from_numpy((integers % VOCABULARY).astype(np.int64)).view(shape)


def build(name: str, dtype: torch.dtype) -> LanguageModel:
    """The model with every parameter away from zero and one, rounded to float32."""
    model = create(MODELS[name]).to(dtype)
    stream = Stream(1 + list(MODELS).index(name))
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.6 if parameter.ndim < 2 else 1.5 / parameter.shape[-1] ** 0.5
            middle = 0.75 if parameter.ndim < 2 else 0.0
            values = middle + size * stream.uniform(parameter.shape)
            parameter.copy_(values.to(torch.float32))
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    stream = Stream(0)
    return stream.tokens(ROWS, POSITIONS), stream.tokens(ROWS, POSITIONS)


def initial_state(model: LanguageModel, dtype: torch.dtype) -> Tensor:
    width = model.config.core_block.width
    return Stream(99).uniform((ROWS, POSITIONS, width)).to(dtype)


def is_looped(name: str) -> bool:
    return MODELS[name].architecture != "transformer"


class Outputs(NamedTuple):
    logits: dict[int, Tensor]
    """By number of loops; of a Transformer only those of one."""
    loss: Tensor
    gradients: dict[str, Tensor]


def outputs(name: str, model: LanguageModel, dtype: torch.dtype) -> Outputs:
    """Logits at several depths from a state of zeros; loss and gradients at a depth per row from a
    state that is not zero."""
    tokens, targets = batch()
    with torch.no_grad():
        if is_looped(name):
            logits = {t: model(tokens, loops=t, state="zero").logits for t in LOOPS}
        else:
            logits = {1: model(tokens).logits}
    settings = {"loops": DEPTHS, "state": initial_state(model, dtype)} if is_looped(name) else {}
    loss = model(tokens, targets, **settings).loss
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    assert None not in gradients.values()
    return Outputs(logits, loss.detach(), gradients)


def optimised(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of the first model after some steps whose gradients are a stream of numbers."""
    model = build("parcae", dtype)
    optimiser = Optimiser(model, OptimiserConfig(kind=kind))
    for step in range(STEPS):
        stream = Stream(1000 + step)
        for parameter in model.parameters():
            parameter.grad = stream.uniform(parameter.shape).to(dtype)
        optimiser.step(Factors())
    return {name: p.detach() for name, p in model.named_parameters()}


def longest_path(name: str) -> int:
    """Terms that are added one after the other on the longest way from a token to a logit."""
    model = MODELS[name]
    width = max(model.width, model.core_block.width)
    hidden = max(model.block.mlp_width, model.core_block.mlp_width)
    block = 6 * width + 2 * POSITIONS + hidden
    loops = LOOPS[-1] if is_looped(name) else 1
    blocks = model.prelude_layers + loops * model.core_layers + model.coda_layers
    return blocks * block + loops * 2 * width + 3 * width


def rounding(name: str, dtype: torch.dtype, passes: int = 1) -> float:
    """The relative error of n additions in a row is below n times half an eps (Higham, Accuracy and
    Stability of Numerical Algorithms, 3.1). A backward pass is twice as long as a forward."""
    return passes * longest_path(name) * torch.finfo(dtype).eps / 2


def main() -> None:
    compute_in_float64()
    tensors: dict[str, Tensor] = {}
    texts: dict[str, list[int]] = {}
    for name in MODELS:
        model = build(name, torch.float64)
        found = outputs(name, model, torch.float64)
        tensors |= {f"{name}/logits/{t}": logits for t, logits in found.logits.items()}
        tensors[f"{name}/loss"] = found.loss
        tensors |= {f"{name}/gradient/{key}": value for key, value in found.gradients.items()}
        texts[name] = greedy(name, model)
    for kind in OPTIMISERS:
        tensors |= {f"{kind}/{key}": value for key, value in optimised(kind, torch.float64).items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, TENSORS)
    TOKENS.write_text(json.dumps(texts, indent=1) + "\n")
    print(f"{TENSORS.name}: {len(tensors)} tensors, {TENSORS.stat().st_size:,} bytes")


def greedy(name: str, model: LanguageModel) -> list[int]:
    """Greedy tokens without a cache; each leads the others by more than float32 rounds."""
    prompt = batch()[0][0].tolist()
    tokens = reference.generate(model, prompt, max_new_tokens=NEW_TOKENS, temperature=0)
    window = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        settings = {"loops": 4, "state": "zero"} if is_looped(name) else {}
        logits = model(window, **settings).logits[0, len(prompt) - 1 : -1]
    first, second = logits.topk(2).values.unbind(-1)
    lead = ((first - second) / logits.abs().amax(-1)).min().item()
    assert lead > 4 * rounding(name, torch.float32), f"{name}: {lead}. Use another seed."
    return tokens


if __name__ == "__main__":
    main()
