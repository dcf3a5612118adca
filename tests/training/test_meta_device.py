"""A training step on the meta device, which stands for an accelerator: it computes shapes only, and
fails where the host reads a value or where a tensor is left on the CPU."""

from __future__ import annotations

import pytest
import torch

from conftest import KINDS, NoHostSync
from parcae.model import build
from parcae.training.optim import Optimiser
from parcae.training.schedule import Factors
from parcae.training.settings import OptimiserConfig


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parcae", "rdm"])
@pytest.mark.parametrize("optimiser", ["muon-adamw", "adamw-atan2"])
def test_a_step_stays_on_its_device(kind, optimiser):
    model = build(KINDS[kind])
    assert model.device.type == "meta"
    tokens = torch.zeros(3, 8, dtype=torch.long, device="meta")
    members = Optimiser(model, OptimiserConfig(kind=optimiser))
    members.members.pop("adamw", None)  # PyTorch's own, fused on accelerators but not on meta
    with NoHostSync("meta") as mode:
        for _ in range(2):
            loss = model(tokens, tokens, loops=[3, 1, 4], state="zero").loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            members.step(Factors(lr=1.0, momentum=0.9, weight_decay=1.0))
            members.zero_grad()
    assert mode.calls > 1000
