"""What transformers expects of `generate` for every causal language model, as tests of this one.

Its `GenerationTesterMixin` also has tests that cannot apply here, or need what is not installed:
offloaded caches (a GPU), quantised caches (optimum-quanto or hqq), FlashAttention (a GPU),
encoder-decoder and stateful models, and prompts as random embeddings without `input_ids`, which
have no value embeddings (refused with a message; see `test_embedded_prompts`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation.configuration_utils import CompileConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

from conftest import KINDS, randomised
from hub_models import in_transformers, ours, random_tokens, theirs  # noqa: F401
from parcae.hub.modeling_parcae import ParcaeForCausalLM

GREEDY = {"do_sample": False, "max_new_tokens": 8}
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def eager(ours) -> ParcaeForCausalLM:
    return in_transformers(ours, attn_implementation="eager")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    ("sample", "beams", "returned"), [(False, 1, 1), (True, 1, 2), (False, 2, 2), (True, 2, 1)]
)
def test_outputs_of_every_step(eager, sample, beams, returned, use_cache):
    """Scores, logits, states and attention of all layer passes, and the cache, by shape."""
    output = eager.generate(
        random_tokens(2, 5),
        do_sample=sample,
        num_beams=beams,
        num_return_sequences=returned,
        max_new_tokens=3,
        use_cache=use_cache,
        **EVERYTHING,
    )
    passes, rows = eager.config.num_hidden_layers, 2 * max(beams, returned)
    assert output.sequences.shape == (2 * returned, 8)
    assert len(output.scores) == len(output.logits) == 3
    assert all(step.shape == (rows, 96) for step in (*output.scores, *output.logits))
    for step in range(3):
        seen = 5 + step
        read = seen if step == 0 or not use_cache else 1
        attentions, states = output.attentions[step], output.hidden_states[step]
        assert [x.shape for x in attentions] == [(rows, 3, read, seen)] * passes
        assert [x.shape for x in states] == [(rows, read, 48)] * (passes + 1)
    if use_cache:
        layers = output.past_key_values.layers
        assert [layer.keys.shape for layer in layers] == [(rows, 3, 7, 16)] * passes
    else:
        assert output.past_key_values is None


def test_the_class_generates():
    assert GenerationMixin in ParcaeForCausalLM.__bases__
    assert ParcaeForCausalLM.can_generate()


def test_without_a_prompt(ours):
    """A text begins with BOS."""
    model = in_transformers(ours, bos_token_id=7)
    assert torch.equal(
        model.generate(bos_token_id=7, **GREEDY), model.generate(torch.tensor([[7]]), **GREEDY)
    )


@pytest.mark.slow
def test_continuing_from_a_cache(theirs):
    """From a cache of the forward, and of `generate`: the texts and caches of one call."""
    tokens = random_tokens(1, 6)
    whole = theirs.generate(tokens, return_dict_in_generate=True, **GREEDY)
    cache = theirs(tokens[:, :4], use_cache=True).past_key_values
    again = theirs.generate(tokens, past_key_values=cache, **GREEDY)
    assert torch.equal(again, whole.sequences)
    options = {"do_sample": False, "return_dict_in_generate": True}
    part = theirs.generate(tokens, max_new_tokens=3, **options)
    rest = theirs.generate(
        part.sequences, past_key_values=part.past_key_values, max_new_tokens=5, **options
    )
    assert torch.equal(rest.sequences, whole.sequences)
    for layer, expected in zip(
        rest.past_key_values.layers, whole.past_key_values.layers, strict=True
    ):
        torch.testing.assert_close(layer.keys, expected.keys, **TOLERANCE)
        torch.testing.assert_close(layer.values, expected.values, **TOLERANCE)


@pytest.mark.slow
def test_left_padding_changes_nothing(theirs):
    long, short = random_tokens(1, 9), random_tokens(1, 5, seed=1)
    batch = torch.zeros(2, 9, dtype=torch.long)
    batch[0], batch[1, 4:] = long[0], short[0]
    mask = (batch != 0).long()
    texts = theirs.generate(batch, attention_mask=mask, **GREEDY)[:, 9:]
    assert torch.equal(texts[:1], theirs.generate(long, **GREEDY)[:, 9:])
    assert torch.equal(texts[1:], theirs.generate(short, **GREEDY)[:, 5:])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = theirs.generate(batch, attention_mask=mask, position_ids=positions, **GREEDY)
    assert torch.equal(given[:, 9:], texts)


@pytest.mark.slow
@pytest.mark.parametrize("loops", [2, 6])
def test_beams_with_and_without_a_cache(theirs, loops):
    options = {**GREEDY, "num_beams": 3, "num_loops": loops, "num_return_sequences": 2}
    tokens = random_tokens(2, 5)
    with_cache = theirs.generate(tokens, use_cache=True, **options)
    assert torch.equal(with_cache, theirs.generate(tokens, use_cache=False, **options))


@pytest.mark.slow
@pytest.mark.parametrize("assistant", ["another", "itself"])
def test_assisted_decoding_is_greedy_decoding(theirs, assistant):
    """With an assistant whose tokens are mostly refused, and with one whose tokens are taken."""
    other = in_transformers(randomised(KINDS["rdm-prenorm"], seed=3))
    options = {"assistant_model": theirs if assistant == "itself" else other}
    tokens = random_tokens(1, 6)
    expected = theirs.generate(tokens, **GREEDY)
    assert torch.equal(theirs.generate(tokens, **options, **GREEDY), expected)
    assert torch.equal(theirs.generate(tokens, logits_to_keep=0, **options, **GREEDY), expected)
    sampled = theirs.generate(tokens, **options, do_sample=True, max_new_tokens=4)
    assert sampled.shape == (1, 10)


@pytest.mark.slow
def test_assisted_decoding_at_another_depth(theirs):
    tokens = random_tokens(1, 6)
    expected = theirs.generate(tokens, num_loops=6, **GREEDY)
    other = in_transformers(randomised(KINDS["rdm-prenorm"], seed=3))
    actual = theirs.generate(tokens, num_loops=6, assistant_model=other, **GREEDY)
    assert torch.equal(actual, expected)


@pytest.mark.slow
def test_an_assistant_has_its_own_loops(theirs, monkeypatch):
    """Its default, or those of its generation configuration; never those of the call."""
    assistant = in_transformers(randomised(KINDS["rdm-prenorm"], seed=3))
    depths = []
    loop = assistant.model._loop
    monkeypatch.setattr(
        assistant.model, "_loop", lambda *args: depths.append(args[3]) or loop(*args)
    )
    tokens = random_tokens(1, 6)
    expected = theirs.generate(tokens, num_loops=6, **GREEDY)
    for own in (None, 2):
        assistant.generation_config.num_loops = own
        for asked in ({"num_loops": 6}, {"generation_config": GenerationConfig(num_loops=6)}):
            options = {"exit": "budget:99", "assistant_model": assistant, **GREEDY, **asked}
            assert torch.equal(theirs.generate(tokens, **options), expected)
            assert set(depths) == {own or assistant.config.num_loops}
            depths.clear()


@pytest.mark.slow
def test_loops_of_a_generation_configuration(ours, tmp_path):
    """They hold unless a call has others; saved and loaded too, as early exit does."""
    model, tokens = in_transformers(ours), random_tokens(2, 5)
    texts = {loops: model.generate(tokens, num_loops=loops, **GREEDY) for loops in (2, 4, 6)}
    assert not torch.equal(texts[2], texts[4])
    model.generation_config = GenerationConfig(num_loops=2, pad_token_id=0)
    model.save_pretrained(tmp_path)
    for loaded in (model, ParcaeForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(loaded.generate(tokens, **GREEDY), texts[2])
        assert torch.equal(loaded.generate(tokens, num_loops=6, **GREEDY), texts[6])
        given = GenerationConfig(num_loops=6, **GREEDY)
        assert torch.equal(loaded.generate(tokens, given), texts[6])
        given = GenerationConfig(num_loops=6, exit="budget:4", max_new_tokens=3)
        passes = loaded.generate(tokens, given, return_dict_in_generate=True, use_cache=True)
        assert len(passes.past_key_values.layers) == 14
        assert loaded.generation_config.num_loops == 2


@pytest.mark.slow
def test_loops_as_other_types(theirs):
    """Also with beams, for which transformers repeats what is given for each sequence."""
    tokens, options = random_tokens(2, 5), {**GREEDY, "num_beams": 2}
    expected = theirs.generate(tokens, num_loops=6, **options)
    for loops in (np.int64(6), torch.tensor(6), torch.tensor([6, 6]), (6, 6), np.array([6, 6])):
        assert torch.equal(theirs.generate(tokens, num_loops=loops, **options), expected)
    logits = theirs(tokens, num_loops=6).logits
    assert torch.equal(theirs(tokens, num_loops=np.int64(6)).logits, logits)


@pytest.mark.parametrize("loops", [0, 2.5, "6", [], [6, 1.5], torch.tensor(2.5)])
def test_loops_that_are_no_whole_numbers(theirs, loops):
    for call in (theirs, theirs.generate):
        with pytest.raises(ValueError, match=r"num_loops: .*whole number"):
            call(random_tokens(2, 5), num_loops=loops)


def test_misspelt_arguments_of_generate(theirs):
    with pytest.raises(ValueError, match="loops"):
        theirs.generate(random_tokens(2, 5), loops=3)


def test_prompt_lookup_is_greedy_decoding(theirs):
    """The prompt repeats itself, so that there is something to look up."""
    tokens = random_tokens(1, 5).repeat(1, 3)
    expected = theirs.generate(tokens, **GREEDY)
    assert torch.equal(theirs.generate(tokens, prompt_lookup_num_tokens=3, **GREEDY), expected)


@pytest.mark.slow
@pytest.mark.parametrize("loops", [None, 6])
def test_static_cache(theirs, loops):
    """The texts of a dynamic cache; slots for every layer pass and as long as the text."""
    tokens = random_tokens(2, 6)
    options = {**GREEDY, "num_loops": loops, "return_dict_in_generate": True}
    static = theirs.generate(tokens, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static.sequences, theirs.generate(tokens, **options).sequences)
    cache = static.past_key_values
    assert isinstance(cache, StaticCache)
    passes = theirs.model.config_for(loops).num_hidden_layers
    assert [layer.keys.shape for layer in cache.layers] == [(2, 3, 13, 16)] * passes


@pytest.mark.slow
def test_compiled_with_a_static_cache(ours):
    """Without graph breaks, twice, and with all outputs; inputs of the second call differ."""
    model = in_transformers(ours, attn_implementation="eager")
    compiling = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    for seed in (0, 1):
        tokens = random_tokens(2, 6, seed=seed)
        options = {"do_sample": False, "max_new_tokens": 4, "num_loops": 2, **EVERYTHING}
        expected = model.generate(tokens, **options)
        assert isinstance(expected.past_key_values, DynamicCache)
        compiled = model.generate(
            tokens, cache_implementation="static", compile_config=compiling, **options
        )
        assert hasattr(model, "_compiled_call")
        assert torch.equal(compiled.sequences, expected.sequences)
        for step in range(4):
            torch.testing.assert_close(compiled.logits[step], expected.logits[step], **TOLERANCE)
            for actual, wanted in zip(
                compiled.hidden_states[step], expected.hidden_states[step], strict=True
            ):
                torch.testing.assert_close(actual, wanted, **TOLERANCE)


def test_generate_needs_one_depth(theirs):
    with pytest.raises(ValueError, match="with a cache, one number for all sequences"):
        theirs.generate(random_tokens(2, 5), num_loops=[2, 3], **GREEDY)


def test_all_logits_or_the_last_ones(theirs):
    tokens = random_tokens(2, 5)
    expected = theirs.generate(tokens, **GREEDY)
    assert torch.equal(theirs.generate(tokens, logits_to_keep=0, **GREEDY), expected)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_attention_functions_give_the_same_text(ours, theirs, implementation):
    model = in_transformers(ours, attn_implementation=implementation)
    tokens = random_tokens(2, 6)
    with torch.compiler.set_stance("force_eager"):
        text = model.generate(tokens, **GREEDY)
    assert torch.equal(text, theirs.generate(tokens, **GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2])
def test_embedded_prompts(theirs, beams):
    """With the token ids, or without: they are found, because layers need them for values."""
    tokens = random_tokens(2, 6)
    embedded = theirs.get_input_embeddings()(tokens)
    options = {**GREEDY, "num_beams": beams}
    expected = theirs.generate(tokens, **options)
    both = theirs.generate(tokens, inputs_embeds=embedded, **options)
    assert torch.equal(both, expected)
    alone = theirs.generate(inputs_embeds=embedded, **options)
    assert torch.equal(alone, expected[:, 6:])
    static = theirs.generate(
        inputs_embeds=embedded, cache_implementation="static", disable_compile=True, **options
    )
    assert torch.equal(static, alone)
    changed = theirs.generate(tokens, inputs_embeds=embedded + 0.5, **options)
    assert not torch.equal(changed, expected)
    with pytest.raises(ValueError, match="Give input_ids too"):
        theirs.generate(inputs_embeds=embedded + 0.5, **options)


def test_continuing_an_embedded_prompt(theirs):
    tokens = random_tokens(1, 6)
    embedded = theirs.get_input_embeddings()(tokens)
    whole = theirs.generate(inputs_embeds=embedded, **GREEDY)
    options = {"do_sample": False, "return_dict_in_generate": True}
    part = theirs.generate(inputs_embeds=embedded, max_new_tokens=3, **options)
    so_far = torch.cat((tokens, part.sequences), dim=1)
    rest = theirs.generate(
        so_far, past_key_values=part.past_key_values, max_new_tokens=5, **options
    )
    assert torch.equal(rest.sequences[:, 6:], whole)


def test_streamed_text_is_the_whole_text(theirs):
    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens: list[int] = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            pass

    collect = Collect()
    whole = theirs.generate(random_tokens(1, 4), streamer=collect, **GREEDY)
    assert collect.tokens == whole[0].tolist()


def test_sampling_with_a_seed(theirs):
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 6, "num_loops": 3}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(theirs.generate(random_tokens(2, 4), **options))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
