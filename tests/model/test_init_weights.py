"""Initial values, as the setups prescribe them."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from conftest import KINDS, tiny
from parcae.model import create
from parcae.model.init_weights import init_weights


def test_scaled_zero():
    model = create(tiny())
    std = math.sqrt(2 / (5 * 48))
    block = model.loop.core.blocks[0]
    for weight in (block.attn.q.weight, block.mlp.fc.weight, model.coda.readout.weight):
        gain = std * math.sqrt(max(weight.shape))
        singular = torch.linalg.svdvals(weight)
        assert torch.allclose(singular, torch.full_like(singular, gain), rtol=1e-4)
    assert not block.attn.out.weight.any()
    assert not block.mlp.proj.weight.any()
    assert model.embed.weight.std().item() == pytest.approx(std, rel=0.03)
    assert model.embed.weight.abs().max() <= 3 * std
    table = next(iter(model.value_tables.values())).weight
    assert table.std().item() == pytest.approx(1.0, rel=0.05)


def test_injection_starts_where_the_reference_does():
    injection = create(tiny()).loop.core.injection
    assert torch.allclose(injection.decay(), torch.tensor(math.sqrt(1 / 5)))
    assert torch.nn.functional.softplus(injection.dt_bias)[0].item() == pytest.approx(
        0.8047, abs=1e-4
    )
    assert not injection.log_A.any()
    assert torch.equal(injection.B, torch.eye(48))
    wide = create(KINDS["parcae-wide-state"]).loop.core.injection.B
    assert torch.allclose(wide.T @ wide, torch.eye(48), atol=1e-5)


def test_scaled_divides_out_projections_by_the_unrolled_depth():
    config = tiny(init="scaled", width=256, heads=4)
    model = create(config)
    std = math.sqrt(2 / (5 * 256))
    depth = 2 + 2 * config.loop.mean_loops
    block = model.loop.core.blocks[0]
    assert block.attn.q.weight.std().item() == pytest.approx(std, rel=0.02)
    out = std / math.sqrt(2 * depth)
    assert block.attn.out.weight.std().item() == pytest.approx(out, rel=0.02)
    assert block.mlp.proj.weight.std().item() == pytest.approx(out, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_weights(kind):
    first, again, other = (create(KINDS[kind], seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_parameter_without_a_rule_is_an_error():
    model = create(tiny())
    model.stray = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="stray"):
        init_weights(model, model.config, torch.Generator())


@pytest.mark.slow
def test_building_a_model_does_not_import_the_compiler():
    """It would take longer than everything else that a command does before it begins."""
    script = (
        "import sys, parcae\n"
        "from parcae.model.flops import parameter_count\n"
        "parcae.create('parcae-1m')\n"
        "assert parameter_count(parcae.preset('transformer-1m')) > 0\n"
        "assert parameter_count(parcae.preset('rdm-1m')) > 0\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
