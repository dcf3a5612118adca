"""Parts from outside the package: registered, used by name, imported from a file."""

from __future__ import annotations

import math
import os
import re
import sys

import pytest
import torch
from torch import nn

import parcae
from conftest import tiny
from parcae.cli import main
from parcae.config import ConfigError, LoopConfig
from parcae.model import create, flops
from parcae.model.depth import sample_rows
from parcae.model.injection import Injection
from parcae.registry import IMPORT_VARIABLE, INJECTIONS, OPTIMISERS, SAMPLERS, Registry, import_file
from parcae.training.optim import Optimiser, assign
from parcae.training.schedule import Factors
from parcae.training.settings import OptimiserConfig
from parcae.training.telemetry import matrices


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Nothing stays registered or imported after a test."""
    monkeypatch.setenv(IMPORT_VARIABLE, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for registry in (INJECTIONS, SAMPLERS, OPTIMISERS):
        monkeypatch.setattr(registry, "_registered", {})


class LowRank(Injection):
    """x = U V h + B e, with nothing but what must be defined."""

    rank = 3

    def __init__(self, config):
        super().__init__(config)
        self.U = nn.Parameter(torch.empty(self.state_width, self.rank))
        self.V = nn.Parameter(torch.empty(self.rank, self.state_width))
        self.B = nn.Parameter(torch.empty(self.state_width, self.width))
        self.scale = nn.Parameter(torch.empty(self.state_width))

    def prepare(self, e):
        return self.U * (1 + self.scale[:, None]), e @ self.B.T

    def mix(self, h, transition, drive):
        return (h @ self.V.T) @ transition.T + drive


class Gated(Injection):
    """x = a(e) h + B e: what depends on e travels in `drive`."""

    stability = "stable"

    def __init__(self, config):
        super().__init__(config)
        self.W = nn.Parameter(torch.empty(2 * self.state_width, self.width))

    def prepare(self, e):
        gate, drive = (e @ self.W.T).chunk(2, dim=-1)
        return None, torch.cat([gate.sigmoid(), drive], dim=-1)

    def mix(self, h, transition, drive):
        gate, drive = drive.chunk(2, dim=-1)
        return gate * h + drive


@pytest.fixture
def low_rank():
    parcae.register_injection("low-rank", LowRank)
    return create(tiny(injection="low-rank", state_width=64, state_heads=4))


def test_the_matrices_of_an_injection_follow_from_what_it_does(low_rank):
    injection = low_rank.loop.core.injection
    with torch.no_grad():
        injection.scale.normal_()
    expected = (injection.U * (1 + injection.scale[:, None])) @ injection.V
    torch.testing.assert_close(injection.transition_matrix(), expected)
    torch.testing.assert_close(injection.input_matrix(), injection.B)
    radius = torch.linalg.eigvals(expected.double()).abs().max().item()
    assert injection.spectral_radius() == pytest.approx(radius, rel=1e-5)


def test_the_default_matrices_and_counts_are_those_that_built_in_injections_declare():
    for name in ("diagonal", "concatenation", "addition"):
        wide = {} if name == "addition" else {"state_width": 64, "state_heads": 4}
        injection = create(tiny(injection=name, **wide)).loop.core.injection
        for method in ("transition_matrix", "input_matrix"):
            default = getattr(Injection, method)(injection)
            torch.testing.assert_close(default, getattr(injection, method)())
        assert Injection.matrix_entries(injection) == injection.matrix_entries()


def test_an_injection_whose_A_depends_on_the_input_runs_and_has_no_spectral_radius(capsys):
    parcae.register_injection("gated", Gated)
    with torch.no_grad():  # as where models are loaded
        model = create(tiny(injection="gated")).eval()
    tokens = torch.randint(96, (3, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, tokens, loops=parcae.Depths((5, 3, 1), (2, 2, 1))).loss.backward()
    injection = model.loop.core.injection
    assert injection.W.grad.any()
    assert injection.transition_matrix() is None
    assert math.isnan(injection.spectral_radius())
    assert matrices(model).keys() == {"input_norm", "readout_norm"}
    with torch.no_grad():
        injection.W.zero_()  # the same where the gate is constant at first
    assert matrices(model).keys() == {"input_norm", "readout_norm"}
    engine = parcae.Engine(model)
    assert engine.generate([1, 2, 3], loops=3, max_new_tokens=4, temperature=0).tokens
    assert main(["show", "parcae-1m", "--model.injection", "gated"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "stable; A depends on the input: its spectral radius is not defined" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prepare": lambda self, e: e @ self.B.T}, "LowRank.prepare returns no pair"),
        ({"prepare": lambda self, e: (None, None)}, "returns a drive of type NoneType"),
        ({"prepare": lambda self, e: (0.5, e @ self.B.T)}, "returns a transition of type float"),
        ({"prepare": lambda self, e: (e.mean(), e @ self.B.T)}, "a transition that depends on e"),
        ({"prepare": lambda self, e: (None, e @ self.B.T)}, "mix fails: AttributeError.*line"),
        (
            {"mix": lambda self, h, a, b: h @ self.D},
            r"mix fails: AttributeError.*test_registry\.py",
        ),
        ({"mix": lambda self, h, a, b: None}, "mix returns type NoneType. Expected: the shape"),
        ({"mix": lambda self, h, a, b: b[:, :1]}, r"mix returns shape \[1, 1, 64\]"),
    ],
)
def test_show_checks_what_a_registered_injection_returns(changes, message, capsys):
    parcae.register_injection("wrong", type("LowRank", (LowRank,), changes))
    wide = ["--model.state_width", "64", "--model.state_heads", "4"]
    assert main(["show", "parcae-1m", "--model.injection", "wrong", *wide]) == 2
    error = capsys.readouterr().err
    assert error.startswith("parcae: model.injection: 'wrong': LowRank")
    assert re.search(message, error), error


def test_flops_count_the_products_of_a_registered_injection(low_rank):
    cost, plain = flops.token_flops(low_rank.config), tiny(state_width=64, state_heads=4)
    assert cost.outside == flops.token_flops(plain).outside  # both have one B
    assert cost.per_loop - flops.token_flops(plain).per_loop == 2 * (3 * 64 + 64 * 3)


def test_a_name_registered_again_is_counted_again(low_rank):
    before = flops.parameter_count(low_rank.config)
    parcae.register_injection("low-rank", type("Wider", (LowRank,), {"rank": 5}))
    assert flops.parameter_count(low_rank.config) == before + 2 * 2 * 64


def test_initial_values_have_a_default(low_rank):
    injection = low_rank.loop.core.injection
    assert not injection.scale.any()
    assert injection.B.std().item() == pytest.approx((2 / (5 * 48)) ** 0.5, rel=0.1)


def test_parameters_of_a_registered_injection_go_to_adamw(low_rank):
    groups = assign(low_rank, "muon-adamw")
    names = {name for name, _ in groups["adamw"]}
    assert {f"loop.core.injection.{name}" for name in ("U", "V", "B", "scale")} <= names


def test_a_registered_sampler():
    @parcae.register_sampler("two-or-nine")
    def two_or_nine(loop, rows, generator, step):
        return [9 if torch.rand((), generator=generator) < 0.5 else 2 for _ in range(rows)]

    loop = LoopConfig(mean_loops=6, backprop_loops=4, sampler="two-or-nine")
    depths = sample_rows(loop, seed=1, step=0, rows=range(32))
    assert set(depths.loops) == {2, 9}
    assert set(depths.gradient_loops) == {2, 4}
    parcae.register_sampler("too-few", lambda loop, rows, generator, step: [])
    with pytest.raises(ValueError, match="0 given for 1 sequences"):
        sample_rows(LoopConfig(sampler="too-few"), seed=1, step=0, rows=range(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda groups, config: torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1),
        lambda groups, config: torch.optim.Adagrad(groups, lr=config.lr),
        lambda groups, config: torch.optim.NAdam(groups, lr=config.lr),
    ],
    ids=["SGD", "Adagrad", "NAdam"],
)
def test_a_registered_optimiser_does_what_it_does_alone(make):
    """The schedule scales its learning rate; a state copied to another continues bit for bit."""
    parcae.register_optimiser("mine", make)
    config = OptimiserConfig(kind="mine", lr=0.1)
    model, alone = create(tiny()), create(tiny())
    optimiser = Optimiser(model, config)
    matrices = [p for p in alone.parameters() if p.ndim >= 2]
    vectors = [p for p in alone.parameters() if p.ndim < 2]
    groups = [{"params": part, "weight_decay": 0.0} for part in (matrices, vectors)]
    reference = make(groups, config)

    def backward(network, seed):
        tokens = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(seed))
        network(tokens, tokens, state="zero").loss.backward()

    def same(one, other):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    for step in range(3):
        backward(model, step)
        optimiser.step(Factors(lr=0.5))
        optimiser.zero_grad()
        backward(alone, step)
        for group in reference.param_groups:
            group["lr"] = 0.05
        reference.step()
        reference.zero_grad()
    assert same(model, alone)

    copy = create(tiny(), seed=1)
    resumed = Optimiser(copy, config)
    copy.load_state_dict(model.state_dict())
    tensors = resumed.tensors()
    assert same(copy, model)
    assert list(tensors) == list(optimiser.tensors())
    for name, tensor in optimiser.tensors().items():
        tensors[name].copy_(tensor)
    for network, its_optimiser in ((model, optimiser), (copy, resumed)):
        backward(network, 3)
        its_optimiser.step(Factors(lr=0.5))
    assert same(copy, model)


def test_state_that_a_checkpoint_cannot_hold_is_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["count"] = 1

    parcae.register_optimiser("counting", lambda groups, config: Counting(groups, lr=config.lr))
    with pytest.raises(ConfigError, match="'counting' has the state count = 1"):
        Optimiser(create(tiny()), OptimiserConfig(kind="counting")).tensors()


def test_names_are_checked():
    with pytest.raises(ConfigError) as error:
        tiny(injection="diagnoal")
    for part in (
        "model.injection: 'diagnoal'",
        "Did you mean diagonal?",
        "concatenation, addition",
    ):
        assert part in str(error.value)
    assert "--import FILE" in str(error.value)
    for name, message in (
        ("diagonal", "built-in"),
        ("none", "built-in"),
        ("a b", "valid injection name"),
    ):
        with pytest.raises(ConfigError, match=message):
            parcae.register_injection(name, LowRank)
    assert "low-rank" not in INJECTIONS


def test_every_built_in_part_exists():
    for registry in (INJECTIONS, SAMPLERS, OPTIMISERS):
        assert all(callable(registry[name]) for name in registry._builtin)
    with pytest.raises(KeyError):
        Registry("part", {})["missing"]


def test_a_file_is_imported_once_and_for_child_processes(tmp_path, capsys):
    path = tmp_path / "ideas.py"
    path.write_text(
        "import neighbour, parcae\n"
        "from parcae.model.injection import AdditionInjection\n"
        "neighbour.count.append(1)\n"
        "parcae.register_injection('mine', AdditionInjection)\n"
    )
    (tmp_path / "neighbour.py").write_text("count = []\n")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npreset = "addition-1m"\ninjection = "mine"\n')
    assert main(["show", str(recipe)]) == 2
    assert "'mine' is not a known injection" in capsys.readouterr().err
    assert main(["show", str(recipe), "--import", str(path)]) == 0
    assert 'injection = "mine"' in capsys.readouterr().out
    import_file(path)
    import neighbour

    assert neighbour.count == [1]
    assert os.environ[IMPORT_VARIABLE] == str(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "no such file"),
        ("notes.txt", "", "not a Python file"),
        ("wrong.py", "\n1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("odd.py", "x = (\n", "line 1: SyntaxError"),
        ("taken.py", "import parcae\nparcae.register_sampler('fixed', print)\n", "a built-in"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path, capsys, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["show", "parcae-1m", "--import", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"parcae: --import {tmp_path / name}: ")
    assert message in error
    assert error.count("\n") == 1
