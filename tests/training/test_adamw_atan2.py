"""The RDM recipe's AdamW against scalars, and its scale invariance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from parcae.training.adamw_atan2 import AdamWAtan2


def brute_force(w: list[float], gradients: list[list[float]], lr: float, decay: float):
    """The equations of the module, number by number, for one tensor."""
    beta1, beta2 = 0.9, 0.95
    w = list(w)
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(gradients, start=1):
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        m_hat = [a / (1 - beta1**t) for a in m]
        v_hat = [a / (1 - beta2**t) for a in v]
        ratios = [0.0 if b == 0 else a * a / b for a, b in zip(g, v_hat, strict=True)]
        rate = lr / max(1.0, math.sqrt(sum(ratios) / len(ratios)))
        w = [
            (1 - decay) * x - rate * math.atan2(a, math.sqrt(b))
            for x, a, b in zip(w, m_hat, v_hat, strict=True)
        ]
    return w


def trained(start, gradients, **options) -> torch.Tensor:
    weight = nn.Parameter(start.clone())
    optimiser = AdamWAtan2([weight], **options)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimiser.step()
    return weight.detach()


def draw(steps: int, *shape: int) -> torch.Tensor:
    return torch.randn(steps, *shape, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_equal_brute_force_also_where_gradients_are_zero_or_surge(decay):
    start, gradients = draw(1, 12)[0], draw(6, 12)
    gradients[:, 3] = 0
    gradients[4] *= 30  # update clipping has work to do
    found = trained(start, gradients, lr=0.1, weight_decay=decay)
    expected = brute_force(start.tolist(), gradients.tolist(), 0.1, decay)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)
    assert found[3] == pytest.approx(start[3] * (1 - decay) ** 6)


def test_a_surge_shortens_the_step():
    """Without clipping it would be longer than the steps before it."""
    gradients = torch.ones(20, 8).double()
    gradients[-1] = 100.0
    path = [trained(torch.zeros(8).double(), gradients[:n], lr=0.1) for n in (18, 19, 20)]
    usual, surge = ((b - a).abs().max() for a, b in ((path[0], path[1]), (path[1], path[2])))
    assert surge < 0.5 * usual


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**-1, 2.0**40])
def test_the_scale_of_all_gradients_changes_nothing(scale):
    start, gradients = draw(1, 3, 5)[0].float(), draw(5, 3, 5).float()
    found = trained(start, scale * gradients, lr=0.1)
    assert torch.equal(found, trained(start, gradients, lr=0.1))
