"""Fixed points that are known in closed form: linear contractions with one and two eigenvalues."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from oracles import Oracle, check_against_oracle, model_of
from parcae.infer.engine import Engine
from parcae.infer.extrapolate import EXTRAPOLATIONS, LARGEST_RATIO, extrapolate

WIDTH = 12


def contraction(eigenvalues: list[float], steps: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """h <- A h + b for three tokens, with A symmetric; the states [3, d] and the fixed points."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(draw(WIDTH, WIDTH)).Q
    spread = torch.tensor([eigenvalues[i % len(eigenvalues)] for i in range(WIDTH)]).double()
    A, b, h = basis @ torch.diag(spread) @ basis.T, draw(3, WIDTH), draw(3, WIDTH)
    states = [h]
    for _ in range(steps):
        h = h @ A.T + b
        states.append(h)
    end = torch.linalg.solve(torch.eye(WIDTH).double() - A, b.T).T
    return [state.float() for state in states], end.float()


@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.85])
def test_aitken_solves_one_eigenvalue(ratio):
    states, end = contraction([ratio], 2)
    torch.testing.assert_close(extrapolate("aitken", states), end, atol=1e-4, rtol=1e-4)
    assert (states[-1] - end).norm() > 0.003


def test_aitken_of_what_does_not_contract_stays_within_bounds():
    """A growing, a turning and a resting state: no step longer than the largest ratio allows."""
    for ratio in (-0.7, 1.0, 1.5):
        states, _ = contraction([ratio], 2)
        step = states[2] - states[1]
        moved = extrapolate("aitken", states) - states[2]
        factor = min(max(ratio, 0.0), LARGEST_RATIO)
        torch.testing.assert_close(moved, factor / (1 - factor) * step, atol=1e-4, rtol=1e-4)
    still = [torch.ones(2, 4)] * 3
    assert torch.equal(extrapolate("aitken", still), still[0])
    assert torch.equal(extrapolate("anderson", [torch.ones(2, 4)] * 4), still[0])


@pytest.mark.parametrize("pair", [(0.5, -0.5), (0.8, 0.2), (0.7, -0.3)])
def test_anderson_solves_two_eigenvalues(pair):
    states, end = contraction(list(pair), 3)
    left = (extrapolate("anderson", states) - end).norm() / (states[-1] - end).norm()
    assert left < 0.01
    assert (extrapolate("aitken", states) - end).norm() > 5 * left * (states[-1] - end).norm()


@pytest.mark.parametrize("count", [3, 4])
def test_anderson_is_ridge_regression_on_the_steps(count):
    states, _ = contraction([0.9, 0.6, 0.3, -0.2], count - 1, seed=3)
    found = extrapolate("anderson", states)
    for token in range(3):
        path = [state[token].double() for state in states]
        steps = [b - a for a, b in itertools.pairwise(path)]
        change = torch.stack([steps[-1] - step for step in steps[:-1]], 1)
        moved = torch.stack([path[-1] - state for state in path[1:-1]], 1)
        ridge = 1e-4 * float(change.square().sum()) / change.shape[1]
        tall = torch.cat((change, ridge**0.5 * torch.eye(change.shape[1]).double()))
        target = torch.cat((steps[-1], torch.zeros(change.shape[1]).double()))
        weights = torch.linalg.lstsq(tall, target[:, None]).solution[:, 0]
        expected = (path[-1] - moved @ weights).float()
        torch.testing.assert_close(found[token], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", EXTRAPOLATIONS)
def test_two_states_say_nothing(kind):
    states, _ = contraction([0.5], 1)
    assert extrapolate(kind, states) is states[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["aitken", "anderson"])
@pytest.mark.parametrize("loops", [1, 2, 5])
def test_decoding_reads_the_guess_and_keeps_the_state(kind, loops):
    model = model_of("parcae")
    options = {"extrapolation": kind, "start": "previous"}
    oracle = Oracle(model, loops, **options)
    check_against_oracle(Engine(model), [5, 17, 80], oracle, new_tokens=5, **options)
