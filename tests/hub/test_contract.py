"""What transformers expects of every causal language model, as tests of this one.

Not applicable: `inputs_embeds` without `input_ids` for models whose layers add embeddings of the
token ids to their values (refused with a message); tensor and pipeline parallel plans (none).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from conftest import KINDS, randomised
from hub_models import in_transformers, ours, random_tokens, theirs  # noqa: F401
from parcae.hub.modeling_parcae import ParcaeForCausalLM

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def test_cache_format(theirs):
    """One dynamic layer per layer pass, shaped [rows, key-value heads, positions, head size]."""
    cache = theirs(random_tokens(2, 7), use_cache=True).past_key_values
    assert len(cache.layers) == theirs.config.num_hidden_layers == 1 + 4 * 2 + 1
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys.shape == layer.values.shape == (2, 3, 7, 16)
    assert cache.get_seq_length() == 7


def test_generation_continues_from_a_cache(theirs):
    tokens = random_tokens(1, 6)
    whole = theirs.generate(tokens, **GREEDY)
    cache = theirs(tokens[:, :4], use_cache=True).past_key_values
    assert torch.equal(theirs.generate(tokens, past_key_values=cache, **GREEDY), whole)
    used = theirs.generate(
        tokens, do_sample=False, max_new_tokens=3, return_dict_in_generate=True, use_cache=True
    )
    more = {"past_key_values": used.past_key_values, "do_sample": False, "max_new_tokens": 5}
    assert torch.equal(theirs.generate(used.sequences, **more), whole)


def test_left_padding_changes_nothing(theirs):
    long, short = random_tokens(1, 9), random_tokens(1, 5, seed=1)
    batch = torch.zeros(2, 9, dtype=torch.long)
    batch[0], batch[1, 4:] = long[0], short[0]
    mask = (batch != 0).long()
    texts = theirs.generate(batch, attention_mask=mask, **GREEDY)[:, 9:]
    assert torch.equal(texts[:1], theirs.generate(long, **GREEDY)[:, 9:])
    assert torch.equal(texts[1:], theirs.generate(short, **GREEDY)[:, 5:])


@pytest.mark.parametrize("loops", [2, 6])
def test_beams_with_and_without_a_cache(theirs, loops):
    options = {**GREEDY, "num_beams": 3, "num_loops": loops, "num_return_sequences": 2}
    tokens = random_tokens(2, 5)
    with_cache = theirs.generate(tokens, use_cache=True, **options)
    assert torch.equal(with_cache, theirs.generate(tokens, use_cache=False, **options))


def test_assisted_decoding_is_greedy_decoding(theirs):
    assistant = in_transformers(randomised(KINDS["rdm-prenorm"], seed=3))
    tokens = random_tokens(1, 6)
    expected = theirs.generate(tokens, **GREEDY)
    assert torch.equal(theirs.generate(tokens, assistant_model=assistant, **GREEDY), expected)
    assert torch.equal(theirs.generate(tokens, prompt_lookup_num_tokens=3, **GREEDY), expected)


@pytest.mark.parametrize("loops", [None, 6])
def test_static_cache(theirs, loops):
    tokens = random_tokens(2, 6)
    options = {**GREEDY, "num_loops": loops, "disable_compile": True}
    static = theirs.generate(tokens, cache_implementation="static", **options)
    assert torch.equal(static, theirs.generate(tokens, **options))


@pytest.mark.slow
def test_the_forward_compiles_as_one_graph(theirs):
    tokens = random_tokens(2, 8)
    with torch.no_grad():
        expected = theirs(tokens, num_loops=2, use_cache=False).logits
        compiled = torch.compile(theirs, fullgraph=True, backend="aot_eager")
        actual = compiled(tokens, num_loops=2, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_rows_of_a_batch_are_independent(theirs):
    tokens = random_tokens(5, 8)
    together = theirs(tokens).logits
    for row in range(5):
        torch.testing.assert_close(
            theirs(tokens[row : row + 1]).logits[0], together[row], atol=1e-5, rtol=1e-5
        )


def test_evaluation_is_deterministic_and_states_start_at_zero(theirs):
    tokens = random_tokens(2, 8)
    assert torch.equal(theirs(tokens).logits, theirs(tokens).logits)


def test_labels_and_ignored_labels(theirs):
    tokens = random_tokens(2, 8)
    labels = tokens.clone()
    labels[0, 5:] = -100
    output = theirs(tokens, labels=labels)
    kept = torch.cat((output.logits[0, :4], output.logits[1, :7]))
    targets = torch.cat((tokens[0, 1:5], tokens[1, 1:]))
    expected = nn.functional.cross_entropy(kept, targets)
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 5])])
def test_logits_to_keep(theirs, kept):
    tokens = random_tokens(2, 8)
    whole = theirs(tokens).logits
    expected = whole[:, -kept:] if isinstance(kept, int) else whole[:, kept]
    torch.testing.assert_close(theirs(tokens, logits_to_keep=kept).logits, expected)


def test_hidden_states_and_attentions_of_every_layer_pass(ours):
    theirs = in_transformers(ours, attn_implementation="eager")
    output = theirs(random_tokens(2, 7), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == theirs.config.num_hidden_layers + 1
    assert len(output.attentions) == theirs.config.num_hidden_layers
    assert all(weights.shape == (2, 3, 7, 7) for weights in output.attentions)


@pytest.mark.parametrize("kind", ["parcae", "swiglu-untied"])
def test_save_and_load(tmp_path, kind):
    config = KINDS["parcae"]
    if kind == "swiglu-untied":
        import dataclasses

        config = dataclasses.replace(config, mlp="swiglu", tied_embeddings=False)
    theirs = in_transformers(randomised(config))
    theirs.save_pretrained(tmp_path / "model")
    loaded, info = ParcaeForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = random_tokens(2, 7)
    assert torch.equal(loaded.eval()(tokens).logits, theirs(tokens).logits)
    saved, read = theirs.config.to_dict(), loaded.config.to_dict()
    assert {**read, "_name_or_path": ""} == {**saved, "_name_or_path": ""}


def test_embeddings_are_tied(theirs):
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert theirs.get_input_embeddings() is theirs.model.embed_tokens


def test_missing_weights_get_initial_values(tmp_path, theirs):
    """Those of `parcae.create`: zero out-projections, orthogonal projections, open gates."""
    from safetensors.torch import load_file, save_file

    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    removed = [name for name in weights if ".core.layers.1." in name or "injection" in name]
    kept = {name: tensor for name, tensor in weights.items() if name not in removed}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = ParcaeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == set(removed)
    layer = loaded.model.core.layers[1]
    assert not layer.self_attn.o_proj.weight.any()
    assert not layer.mlp.proj.weight.any()
    assert torch.equal(layer.input_layernorm.weight, torch.ones(48))
    gram = layer.self_attn.q_proj.weight @ layer.self_attn.q_proj.weight.T
    torch.testing.assert_close(gram / gram[0, 0], torch.eye(48), atol=1e-5, rtol=1e-5)
    assert torch.equal(loaded.model.core.injection.B, torch.eye(48))
    for name, tensor in kept.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_embeddings_can_be_resized(ours):
    theirs = in_transformers(ours)
    theirs.resize_token_embeddings(100)
    assert theirs.config.vocab_size == 100
    assert theirs(random_tokens(1, 5)).logits.shape[-1] == 100


def test_gradient_checkpointing_gives_the_same_gradients(ours):
    tokens = random_tokens(2, 8)
    gradients = []
    for checkpointing in (False, True):
        theirs = in_transformers(ours)
        theirs.train()
        if checkpointing:
            theirs.gradient_checkpointing_enable()
        torch.manual_seed(0)
        theirs(tokens, labels=tokens, num_loops=3).loss.backward()
        gradients.append([p.grad for p in theirs.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-6, rtol=1e-5)


def test_embeddings_without_token_ids_are_refused(theirs):
    embedded = theirs.get_input_embeddings()(random_tokens(1, 4))
    with pytest.raises(ValueError, match="Give input_ids"):
        theirs(inputs_embeds=embedded)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        theirs()


def test_crop_takes_tokens_back(theirs):
    tokens = random_tokens(1, 8)
    cache = DynamicCache(config=theirs.config)
    theirs(tokens[:, :6], past_key_values=cache)
    cache.crop(-2)
    after = theirs(tokens[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(after, theirs(tokens).logits[:, 4:], atol=1e-5, rtol=1e-5)


def test_half_precision(ours):
    theirs = in_transformers(ours).to(torch.bfloat16)
    text = theirs.generate(random_tokens(2, 5), **GREEDY)
    assert text.shape == (2, 13)
