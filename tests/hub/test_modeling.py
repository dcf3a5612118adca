"""The model in transformers computes what the model of this package computes."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache, StaticCache

import parcae
from conftest import KINDS, randomised
from hub_models import (  # noqa: F401
    TRANSFORMER,
    in_transformers,
    modelling_file,
    ours,
    random_tokens,
    theirs,
)
from parcae.config import LoopConfig, ModelConfig
from parcae.hub.configuration_parcae import ParcaeConfig
from parcae.hub.loops import SAMPLER_FUNCTIONS
from parcae.model.hf_format import (
    SAMPLERS,
    from_hf_config,
    from_hf_weights,
    to_hf_config,
    to_hf_weights,
)
from parcae.presets import PRESETS, preset

TOLERANCE = 1e-5
EXTRA = {
    "transformer": TRANSFORMER,
    "swiglu-untied": dataclasses.replace(KINDS["parcae"], mlp="swiglu", tied_embeddings=False),
    "no-value-embeddings": dataclasses.replace(KINDS["parcae"], value_embeddings=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *EXTRA])
def test_logits_agree(kind):
    """At several depths; whole, from a cache, with padding on either side."""
    ours = randomised({**KINDS, **EXTRA}[kind]).eval()
    check_logits(ours, in_transformers(ours))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parcae", "rdm", "transformer"])
def test_logits_of_the_modelling_file_agree(kind):
    """The file that exported and saved folders have, which imports nothing of this package."""
    ours = randomised({**KINDS, **EXTRA}[kind]).eval()
    theirs = in_transformers(ours, modelling_file())
    assert not type(theirs).__module__.startswith("parcae")
    check_logits(ours, theirs)


def check_logits(ours, theirs) -> None:
    looped = ours.config.architecture == "looped"
    tokens = random_tokens(3, 14)
    left = torch.cat((torch.zeros(3, 4, dtype=torch.long), tokens), dim=1)
    right = torch.cat((tokens, torch.zeros(3, 4, dtype=torch.long)), dim=1)
    with torch.no_grad():
        for loops in (1, 4, 7) if looped else (1,):
            options = {"num_loops": loops} if looped else {}
            given = {"loops": loops, "state": "zero"} if looped else {}
            expected = ours(tokens, **given).logits
            assert_close(theirs(tokens, **options).logits, expected)
            start = theirs(tokens[:, :9], use_cache=True, **options)
            rest = theirs(tokens[:, 9:], past_key_values=start.past_key_values, **options)
            assert_close(rest.logits, expected[:, 9:])
            mask = (torch.arange(18) >= 4).long().expand(3, 18)
            assert_close(theirs(left, attention_mask=mask, **options).logits[:, 4:], expected)
            mask = (torch.arange(18) < 14).long().expand(3, 18)
            assert_close(theirs(right, attention_mask=mask, **options).logits[:, :14], expected)


def test_every_row_may_have_its_own_depth(ours, theirs):
    """Logits and gradients: the last loops of each row have gradient, as in training."""
    tokens, loops = random_tokens(4, 10), [7, 1, 3, 4]
    results = []
    for model, options in (
        (ours, {"loops": loops, "state": "zero"}),
        (theirs, {"num_loops": loops}),
    ):
        model.zero_grad()
        logits = model(tokens, **options).logits
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        results.append((logits, {n: p.grad.clone() for n, p in model.named_parameters()}))
        model.zero_grad()
    (expected, gradients), (logits, their_gradients) = results
    assert_close(logits, expected)
    for name, gradient in to_hf_weights(gradients, ours.config).items():
        assert_close(their_gradients[name], gradient)


def test_training_draws_a_depth_for_each_sequence(ours):
    """The same sampler as in this package, from PyTorch's seed; evaluation draws nothing."""
    theirs = in_transformers(ours)
    theirs.train()
    torch.manual_seed(0)
    drawn = [theirs.model._depths(None, 8, None) for _ in range(50)]
    loops = torch.tensor([depths.loops for depths in drawn]).float()
    assert loops.std() > 1.0
    assert loops.mean() == pytest.approx(4, abs=0.5)  # 400 draws of a Poisson: 4 +- 0.1
    assert all(k <= 2 for depths in drawn for k in depths.gradient_loops)
    theirs.eval()
    tokens = random_tokens(2, 8)
    assert torch.equal(theirs(tokens).logits, theirs(tokens, num_loops=4).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(ours, implementation):
    theirs = in_transformers(ours, attn_implementation=implementation)
    tokens = random_tokens(2, 9)
    expected = ours(tokens, loops=4, state="zero").logits
    assert_close(theirs(tokens).logits, expected)


def test_engine_and_generate_exit_alike(ours, theirs):
    engine = parcae.Engine(ours)
    prompts = random_tokens(4, 6)
    for rule in ("state:0.3", "budget:2"):
        options = {"max_new_tokens": 8, "do_sample": False, "num_loops": 6, "exit": rule}
        texts = theirs.generate(prompts, **options)[:, 6:]
        for row, prompt in zip(texts.tolist(), prompts.tolist(), strict=True):
            ours_text = engine.generate(prompt, max_new_tokens=8, loops=6, temperature=0, exit=rule)
            assert tuple(row) == ours_text.tokens
    with pytest.raises(ValueError, match=r"parcae\.Engine"):
        theirs.generate(prompts, max_new_tokens=2, exit="kl:0.1")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_convert_and_convert_back(name):
    config = preset(name, {})
    theirs = ParcaeConfig(**to_hf_config(config))
    back = from_hf_config(theirs.to_diff_dict())
    assert to_hf_config(back) == to_hf_config(config)
    once = config.prelude_layers + config.coda_layers
    passes = once + config.core_layers * config.loop.nominal_loops
    assert theirs.num_hidden_layers == passes


@pytest.mark.parametrize("kind", KINDS)
def test_weights_convert_and_convert_back(kind):
    weights = randomised(KINDS[kind]).state_dict()
    back = from_hf_weights(to_hf_weights(weights, KINDS[kind]), KINDS[kind])
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_cache_with_too_few_slots_is_refused(theirs):
    cache = DynamicCache(config=theirs.config)
    with pytest.raises(ValueError, match="needs 14"):
        theirs(random_tokens(1, 3), past_key_values=cache, num_loops=6)
    for model in (theirs, theirs.model):  # either has what the message names
        cache = StaticCache(config=model.config_for(6), max_cache_len=8)
        model(random_tokens(1, 3), past_key_values=cache, num_loops=6)


@pytest.mark.parametrize("loops", [0, [1, 2, 3]])
def test_wrong_loops_are_refused(theirs, loops):
    with pytest.raises(ValueError, match="num_loops"):
        theirs(random_tokens(2, 3), num_loops=loops)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 50},
        {"num_key_value_heads": 2},
        {"num_loops": 0},
        {"num_prelude_layers": -1},
        {"vocab_size": 0},
        {"injection": "unknown"},
        {"state_init": "zeros"},
        {"norm": "post"},
        {"mlp": "gelu"},
        {"init": "zero"},
        {"sampler": "uniform"},
        {"draw_per": "batch"},
        {"discretisation": "euler"},
        {"mean_loops": 0},
        {"backprop_loops": -1},
        {"rms_norm_eps": 0.0},
        {"rope_theta": float("nan")},
        {"value_layers": [4]},
    ],
)
def test_wrong_configurations_are_refused(change):
    with pytest.raises(Exception, match=rf"heads|layers|gradient_loops|{next(iter(change))}"):
        in_transformers_config = ParcaeConfig(**{**to_hf_config(KINDS["parcae"]), **change})
        from parcae.hub.modeling_parcae import ParcaeForCausalLM

        ParcaeForCausalLM(in_transformers_config)


def test_choices_are_those_of_this_package():
    """The configuration in a folder repeats them, because it is read without the package."""
    theirs, ours = ParcaeConfig.__annotations__, get_type_hints(ModelConfig)
    ours |= get_type_hints(LoopConfig)
    for name in ("discretisation", "mlp", "norm", "init", "draw_per", "state_init"):
        assert theirs[name] == ours[name], name
    assert get_args(theirs["sampler"]) == SAMPLERS == tuple(SAMPLER_FUNCTIONS)


@pytest.mark.parametrize("name", ["loops", "num_loop", "state"])
def test_unknown_arguments_are_refused(theirs, name):
    for model in (theirs, theirs.model):
        with pytest.raises(TypeError, match=f"{name}: unknown arguments.*num_loops"):
            model(random_tokens(1, 3), **{name: 3})
    theirs(random_tokens(1, 3), num_items_in_batch=2, output_attentions=False, return_dict=True)


def test_vllm_is_refused_where_heads_differ():
    """Its caches have one shape for all layers. It sets its attention before it builds a model."""
    from transformers import AttentionInterface

    AttentionInterface.register("vllm", lambda *args, **kwargs: None)
    in_transformers(randomised(KINDS["parcae"]), attn_implementation="vllm")
    with pytest.raises(ValueError, match=r"\(3, 3, 16\) and in the core \(4, 4, 16\)"):
        in_transformers(randomised(KINDS["parcae-wide-state"]), attn_implementation="vllm")


def test_pipeline_parallelism_is_refused(theirs):
    """vLLM asks for this where it is wanted, and passes on the message."""
    with pytest.raises(ValueError, match="passes the core several times"):
        theirs.model.supports_pp_plan


def test_a_part_from_outside_cannot_be_exported():
    parcae.register_sampler("two", lambda loop, rows, generator, step: [2] * rows)
    config = dataclasses.replace(KINDS["parcae"], loop=LoopConfig(sampler="two"))
    with pytest.raises(parcae.ConfigError, match=r"model\.loop\.sampler: 'two'"):
        to_hf_config(config)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
