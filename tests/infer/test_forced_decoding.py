"""Forced decoding against the loss of a forward, and with shortcuts against the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import KINDS, randomised
from forced_decoding import decode_forced
from oracles import Oracle, model_of
from parcae.config import ConfigError
from parcae.infer.exit import ExitRule
from parcae.infer.network import open_network
from parcae.infer.request import DepthPlan

ROWS = torch.randint(0, 96, (3, 14), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_exact_decoding_has_the_loss_of_a_forward(kind):
    model = model_of(kind)
    steps = []
    found = decode_forced(
        open_network(model), ROWS, DepthPlan(loops=3), prompt=5, on_step=lambda: steps.append(1)
    )
    logits = model(ROWS[:, :-1], loops=3, state="zero").logits[:, 5:]
    expected = F.cross_entropy(logits.transpose(1, 2), ROWS[:, 6:], reduction="none")
    torch.testing.assert_close(found.nats, expected, atol=1e-4, rtol=0)
    assert found.loss == pytest.approx(float(expected.mean()), abs=1e-4)
    assert (found.loops == 3).all()
    assert found.mean_loops == 3
    assert len(steps) == 8
    assert found.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "shared"},
        {"policy": "last:2", "exit": "kl:0.05"},
        {"exit": "state:0.3"},
        {"policy": "first:2", "exit": "budget:3"},
    ],
)
def test_shortcuts_have_the_loss_of_the_oracle(options):
    model = model_of("parcae")
    policy = options.get("policy", "full")
    plan = {key: value for key, value in options.items() if key != "policy"}
    rule = ExitRule.parse(plan["exit"]) if "exit" in plan else None
    asked = DepthPlan(loops=5, **{**plan, "exit": rule})
    found = decode_forced(open_network(model), ROWS, asked, policy, prompt=4)
    for row, nats, loops in zip(ROWS.tolist(), found.nats, found.loops, strict=True):
        oracle = Oracle(model, 5, policy=policy, **plan)
        oracle.prompt(row[:4])
        for at in range(4, len(row) - 1):
            chances = oracle.decode(row[at]).log_softmax(-1)
            assert float(nats[at - 4]) == pytest.approx(-float(chances[row[at + 1]]), abs=1e-4)
            assert int(loops[at - 4]) == oracle.ran


def test_rows_may_fill_the_context():
    network = open_network(randomised(KINDS["parcae"]))
    rows = torch.zeros(1, 33, dtype=torch.long)
    assert decode_forced(network, rows, DepthPlan(loops=1), prompt=31).nats.shape == (1, 1)
    with pytest.raises(ConfigError, match="34 tokens do not fit"):
        decode_forced(network, torch.zeros(1, 34, dtype=torch.long), DepthPlan(loops=1), prompt=9)


@pytest.mark.parametrize("prompt", [0, 13, 14])
def test_something_must_be_left_to_decode(prompt):
    with pytest.raises(ConfigError, match="prompt: "):
        decode_forced(open_network(model_of("parcae")), ROWS, DepthPlan(loops=1), prompt=prompt)
