"""The optimisers of a model together: who takes what, the state, resuming, the release's AdamW."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import KINDS, randomised, tiny
from parcae.model.base import LanguageModel
from parcae.presets import preset
from parcae.training.optim import Optimiser, assign
from parcae.training.schedule import Factors
from parcae.training.settings import OptimiserConfig

MODELS = {
    **KINDS,
    "untied": tiny(tied_embeddings=False),
    "transformer": preset("transformer-1m", {"vocab_size": 96, "context_length": 32}),
}
OPTIMISERS = ("muon-adamw", "adamw", "adamw-atan2")


def backward(model: LanguageModel, seed: int = 0) -> None:
    tokens, targets = torch.randint(96, (2, 2, 16), generator=torch.Generator().manual_seed(seed))
    model(tokens, targets, state="zero").loss.backward()


def steps(model: LanguageModel, optimiser: Optimiser, seeds: range) -> None:
    for seed in seeds:
        backward(model, seed)
        optimiser.step(Factors(lr=1 - seed / 20, momentum=0.9, weight_decay=0.5))
        optimiser.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", OPTIMISERS)
def test_every_parameter_is_in_exactly_one_group(name, kind):
    model = randomised(MODELS[name])
    groups = assign(model, kind)
    assert set(groups) == ({"muon", "adamw"} if kind == "muon-adamw" else {kind})
    placed = [n for named in groups.values() for n, _ in named]
    assert sorted(placed) == sorted(n for n, _ in model.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_muon_takes_the_matrices_of_attention_and_mlp_and_nothing_else(name):
    model = randomised(MODELS[name])
    taken = {n for n, _ in assign(model, "muon-adamw")["muon"]}
    matrices = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.fc", "mlp.proj")
    by_name = {
        n for n, _ in model.named_parameters() if n.endswith(tuple(f"{m}.weight" for m in matrices))
    }
    assert taken == by_name
    assert len(taken) == 6 * model.config.layers


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_the_state_is_there_before_the_first_step_and_stays_the_same_tensors(kind):
    model = randomised(tiny())
    optimiser = Optimiser(model, OptimiserConfig(kind=kind))
    before = optimiser.tensors()
    assert all(not t.any() for t in before.values())
    for name, _ in model.named_parameters():
        slots = {key.rpartition(".")[2] for key in before if key.startswith(f"{name}.")}
        assert slots in ({"momentum", "variance"}, {"step", "exp_avg", "exp_avg_sq"})
    steps(model, optimiser, range(1))
    after = optimiser.tensors()
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(t.any() for t in after.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMISERS)
def test_a_state_copied_into_a_new_optimiser_continues_bit_for_bit(kind):
    config = OptimiserConfig(kind=kind, lr=1e-2, weight_decay=0.1)
    model, copy = randomised(tiny()), randomised(tiny(), seed=5)
    optimiser, resumed = Optimiser(model, config), Optimiser(copy, config)
    steps(model, optimiser, range(3))
    with torch.no_grad():
        copy.load_state_dict(model.state_dict())
        for name, tensor in resumed.tensors().items():
            tensor.copy_(optimiser.tensors()[name])
    steps(model, optimiser, range(3, 6))
    steps(copy, resumed, range(3, 6))
    for (name, a), b in zip(model.named_parameters(), copy.parameters(), strict=True):
        assert torch.equal(a, b), name
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, optimiser.tensors()[name]), name


def test_adamw_with_its_state_made_early_steps_exactly_like_torchs_own():
    config = OptimiserConfig(kind="adamw", lr=1e-2)
    ours, theirs = randomised(tiny()), randomised(tiny())
    optimiser = Optimiser(ours, config)
    own = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.8, 0.95), eps=1e-10, weight_decay=0, fused=True
    )
    for _ in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            backward(model)
        optimiser.step(Factors())
        own.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_frozen_parameters_and_those_without_gradient_stay_where_they_are(kind):
    model = randomised(tiny())
    frozen, idle = model.get_parameter("embed.weight"), model.get_parameter("loop.core.injection.B")
    idle_matrix = model.get_parameter("coda.blocks.0.mlp.fc.weight")
    frozen.requires_grad_(False)
    optimiser = Optimiser(model, OptimiserConfig(kind=kind, weight_decay=0.1))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    backward(model)
    idle.grad = idle_matrix.grad = None
    optimiser.step(Factors())
    assert not any(name.startswith("embed.weight.") for name in optimiser.tensors())
    for name, p in model.named_parameters():
        stays = p is frozen or p is idle or p is idle_matrix
        assert torch.equal(p, before[name]) == stays, name


def test_a_model_that_is_frozen_altogether_is_left_alone():
    model = randomised(tiny()).requires_grad_(False)
    optimiser = Optimiser(model, OptimiserConfig())
    optimiser.step(Factors())
    assert optimiser.tensors() == optimiser.learning_rates() == {}


def test_factors_set_rates_momentum_and_decay_of_the_step():
    model = randomised(tiny())
    optimiser = Optimiser(model, OptimiserConfig(lr=4e-3, muon_lr=8e-3))
    assert optimiser.learning_rates() == {"adamw": 4e-3, "muon": 8e-3}
    optimiser.step(Factors(lr=0.5, momentum=0.9, weight_decay=0.25))
    assert optimiser.learning_rates() == {"adamw": 2e-3, "muon": 4e-3}
    (muon,) = optimiser.members["muon"].param_groups
    assert (muon["momentum"], muon["weight_decay"]) == (0.9, pytest.approx(0.05))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    steps(model, optimiser, range(20, 21))  # a learning rate of zero
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["adamw", "adamw-atan2"])
def test_weight_decay_is_for_matrices_only(kind):
    ways = []
    for decay in (0.0, 0.1):
        model = randomised(tiny())
        steps(model, Optimiser(model, OptimiserConfig(kind=kind, weight_decay=decay)), range(1))
        ways.append(dict(model.named_parameters()))
    for name, p in ways[0].items():
        assert torch.equal(p, ways[1][name]) == (p.ndim < 2), name


def test_adamw_equals_the_releases(shared_data):
    golden = load_file(shared_data / "fixtures" / "muon_adamw_golden.safetensors")
    names = ("adapter.A_log", "adapter.B", "wte.weight")
    model = torch.nn.Module()
    found: dict[str, Tensor] = {}
    for name in names:
        found[name] = torch.nn.Parameter(golden[f"start.transformer.{name}"].clone())
        model.register_parameter(name.replace(".", "_"), found[name])
    optimiser = Optimiser(model, OptimiserConfig(lr=8e-3))
    for step in range(6):
        for name, p in found.items():
            p.grad = golden[f"grad{step}.transformer.{name}"]
        optimiser.step(Factors())
        for name, p in found.items():
            expected = golden[f"after{step}.transformer.{name}"]
            torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-6)
