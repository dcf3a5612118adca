"""Smaller weights: near the large ones, whatever the shape, and the same in company as alone."""

from __future__ import annotations

import pytest
import torch

from conftest import RDM, randomised, tiny
from oracles import VOCABULARY, chances_of, model_of
from oracles import GreedyEngine as Engine
from parcae.infer.quantise import matrix

SMALL = ["int8", "bfloat16"]
WIDTHS = [16, 32, 48, 64, 8, 20, 33, 40, 136]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("outputs", [1, 3, 4, 6, 33, 96])
def test_int8_is_the_product_of_rounded_weights_and_inputs(width, outputs):
    weight, x = draw(outputs, width), draw(5, width, seed=1)
    step = weight.abs().amax(1, keepdim=True) / 127
    found = matrix(weight, "int8")(x)
    assert found.dtype == torch.float32
    input_step = x.abs().amax(1, keepdim=True) / 127
    bound = x.abs() @ (0.501 * step.expand_as(weight)).T  # half a step for each weight
    bound += 0.501 * input_step * (weight.abs() + step).sum(1)  # and for each input
    assert ((found - x @ weight.T).abs() <= bound).all()


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("width", WIDTHS)
def test_small_products_do_not_know_their_company(kind, width):
    product = matrix(draw(24, width), kind)
    x = draw(9, width, seed=2)
    together = product(x)
    alone = torch.cat([product(row[None]) for row in x])
    torch.testing.assert_close(together, alone, atol=2**-8 * float(together.abs().max()), rtol=0)
    if kind == "int8":
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_rows_of_zeros_and_strided_inputs():
    weight = draw(8, 32)
    weight[3] = 0
    x = draw(32, 5).T
    assert not x.is_contiguous()
    for product in (matrix(weight, kind) for kind in SMALL):
        found = product(x)
        assert found.isfinite().all()
        assert (found[:, 3] == 0).all()
        torch.testing.assert_close(found, product(x.contiguous()))


SHAPES = {
    "parcae": tiny(),
    "aligned": tiny(width=64, heads=4),
    "odd": tiny(width=40, heads=2, mlp_width=52),
    "odd-rdm": tiny(**{**RDM, "mlp_width": 36}, width=40, heads=2, norm="residual"),
    "odd-state": tiny(width=40, heads=2, state_width=56, state_heads=4),
}


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_predictions_are_near_those_of_large_weights(kind, shape):
    model = randomised(SHAPES[shape])
    prompt = [5, 17, 80, 41]
    options = {"max_new_tokens": 1, "loops": 4, "logprobs": VOCABULARY}
    exact = chances_of(Engine(model).generate(prompt, **options))
    near = chances_of(Engine(model, weight_dtype=kind).generate(prompt, **options))
    spread = float(exact.std())
    assert 0 < (near - exact).abs().max() < 0.15 * spread
    assert (near - exact).square().mean().sqrt() < 0.05 * spread


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_texts_do_not_know_their_company(kind):
    model = model_of("parcae")
    prompts = [[i, 2 * i + 1, 3][: 1 + i % 3] for i in range(9)]
    options = {"max_new_tokens": 5, "loops": 3, "logprobs": VOCABULARY}
    engine = Engine(model, weight_dtype=kind)
    for prompt, made in zip(prompts, engine.generate_all(prompts, **options), strict=True):
        alone = Engine(model, weight_dtype=kind).generate(prompt, **options)
        first = (chances_of(made)[0] - chances_of(alone)[0]).abs().max()
        assert first < 0.03, "after the same prompt"
        if made.tokens == alone.tokens:
            assert (chances_of(made) - chances_of(alone)).abs().max() < 0.1
