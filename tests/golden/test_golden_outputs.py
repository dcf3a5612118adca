"""Logits, losses, gradients, tokens and optimiser steps are the stored ones, on any machine."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import reference
from golden import outputs
from golden.outputs import DEPTHS, MODELS, OPTIMISERS, build, rounding
from parcae import Engine
from parcae.training.muon import COEFFICIENTS

NAMES = pytest.mark.parametrize("name", MODELS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(outputs.TENSORS)


@pytest.fixture
def computing(dtype, monkeypatch):
    """Computes all in `dtype`, also what the model computes in float32 whatever its weights are."""
    if dtype == torch.float64:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_within(found: Tensor, expected: Tensor, relative: float, what: object) -> None:
    """The largest difference is at most `relative` times the largest value."""
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= relative * expected.abs().max().item(), what


@DTYPES
@NAMES
@pytest.mark.usefixtures("computing")
def test_logits_loss_and_every_gradient(name, dtype, golden):
    found = outputs.outputs(name, build(name, dtype), dtype)
    for loops, logits in found.logits.items():
        assert logits.dtype == dtype
        assert_within(logits, golden[f"{name}/logits/{loops}"], rounding(name, dtype), loops)
    assert_within(found.loss, golden[f"{name}/loss"], rounding(name, dtype), "loss")
    expected = {key for key in golden if key.startswith(f"{name}/gradient/")}
    assert {f"{name}/gradient/{key}" for key in found.gradients} == expected
    for key, gradient in found.gradients.items():
        relative = rounding(name, dtype, passes=3)
        assert_within(gradient, golden[f"{name}/gradient/{key}"], relative, key)


@pytest.mark.parametrize("name", [name for name in MODELS if outputs.is_looped(name)])
@pytest.mark.parametrize("dtype", [torch.float64])
@pytest.mark.usefixtures("computing")
def test_the_stored_numbers_are_those_of_the_plain_implementation(name, dtype, golden):
    """Which shares no code with the model."""
    model, (tokens, targets) = build(name, dtype), outputs.batch()
    state = outputs.initial_state(model, dtype)
    loss = reference.forward(model, tokens, targets, DEPTHS, state)
    assert_within(loss.detach(), golden[f"{name}/loss"], rounding(name, dtype), "loss")
    with torch.no_grad():
        for loops in outputs.LOOPS:
            depths = type(DEPTHS)((loops,) * outputs.ROWS, (1,) * outputs.ROWS)
            logits = reference.forward(model, tokens, None, depths, torch.zeros_like(state))
            assert_within(logits, golden[f"{name}/logits/{loops}"], rounding(name, dtype), loops)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@NAMES
def test_greedy_tokens(name, backend):
    """Of the compiled kernels where there is a compiler, and of PyTorch."""
    expected = json.loads(outputs.TOKENS.read_text())[name]
    engine = Engine(build(name, torch.float32).eval(), backend=backend)
    prompt = outputs.batch()[0][0].tolist()
    tokens = engine.generate(prompt, max_new_tokens=outputs.NEW_TOKENS, temperature=0).tokens
    assert list(tokens) == expected


@pytest.mark.parametrize("kind", OPTIMISERS)
@pytest.mark.parametrize("dtype", [torch.float64])
@pytest.mark.usefixtures("computing")
def test_optimiser_steps(kind, dtype, golden):
    """In float64: orthogonalisation enlarges the smallest singular values about 990 times and the
    cautious decay asks for the sign of an update, so in float32 some entries hang on rounding."""
    products = 3 * len(COEFFICIENTS) * outputs.STEPS
    longest = 4 * MODELS["parcae"].width
    relative = 990 * products * longest * torch.finfo(dtype).eps / 2  # 2e-10
    found = outputs.optimised(kind, dtype)
    assert {f"{kind}/{key}" for key in found} == {k for k in golden if k.startswith(f"{kind}/")}
    for key, weight in found.items():
        assert_within(weight, golden[f"{kind}/{key}"], relative, key)


def test_the_files_are_small():
    assert sum(file.stat().st_size for file in outputs.FOLDER.iterdir() if file.is_file()) < 2e6
