"""What transformers expects of every causal language model, as tests of this one.

Generation is in test_hub_generation.py, saved folders are in test_saving.py, training, several
devices and offloading to CPU and disk in test_training.py. Tests of its `ModelTesterMixin` that
cannot apply: tensor and expert parallel plans, weights kept in float32, conversion of weight names,
RoPE scaling, sliding windows, experts, encoders and several modalities (the model has none of
these); DeepSpeed, FlashAttention and kernels (they need an accelerator); compiled training without
`num_loops`, because depths are drawn outside of the graph.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from conftest import KINDS, randomised
from hub_models import in_transformers, ours, random_tokens, theirs  # noqa: F401
from parcae.hub.modeling_parcae import ParcaeForCausalLM, ParcaeModel

pytestmark = pytest.mark.slow

GREEDY = {"do_sample": False, "max_new_tokens": 8}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def test_cache_format(theirs):
    """One dynamic layer per layer pass, shaped [rows, key-value heads, positions, head size]."""
    cache = theirs(random_tokens(2, 7), use_cache=True).past_key_values
    assert len(cache.layers) == theirs.config.num_hidden_layers == 1 + 4 * 2 + 1
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys.shape == layer.values.shape == (2, 3, 7, 16)
    assert cache.get_seq_length() == 7


@pytest.mark.slow
def test_the_forward_compiles_as_one_graph(ours):
    """With its gradients, of a model in training mode whose states start at zero."""
    model = in_transformers(ours, state_init="zero").train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens, gradients = random_tokens(2, 8), []
    for forward in (model, compiled):
        model.zero_grad()
        loss = forward(tokens, labels=tokens, num_loops=2, use_cache=False).loss
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, **TOLERANCE, msg=name)


def test_rows_of_a_batch_are_independent(theirs):
    tokens = random_tokens(5, 8)
    together = theirs(tokens).logits
    for row in range(5):
        torch.testing.assert_close(
            theirs(tokens[row : row + 1]).logits[0], together[row], **TOLERANCE
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


@pytest.mark.parametrize("kind", ["parcae", "swiglu-untied"])
def test_save_and_load(tmp_path, kind):
    config = KINDS["parcae"]
    if kind == "swiglu-untied":
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
    torch.testing.assert_close(gram / gram[0, 0], torch.eye(48), **TOLERANCE)
    assert torch.equal(loaded.model.core.injection.B, torch.eye(48))
    for name, tensor in kept.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_crop_takes_tokens_back(theirs):
    tokens = random_tokens(1, 8)
    cache = DynamicCache(config=theirs.config)
    theirs(tokens[:, :6], past_key_values=cache)
    cache.crop(-2)
    after = theirs(tokens[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(after, theirs(tokens).logits[:, 4:], **TOLERANCE)


@pytest.mark.slow
def test_half_precision(ours):
    theirs = in_transformers(ours).to(torch.bfloat16)
    text = theirs.generate(random_tokens(2, 5), **GREEDY)
    assert text.shape == (2, 13)


@pytest.mark.parametrize(
    "kept", [1, 3, torch.tensor([0, 5]), torch.tensor([[0, 5], [7, 1]]), torch.eye(2, 8) > 0]
)
def test_logits_to_keep(theirs, kept):
    """The last ones, the same positions of all rows, positions of each row, marked positions."""
    tokens = random_tokens(2, 8)
    whole = theirs(tokens).logits
    if isinstance(kept, int):
        expected = whole[:, -kept:]
    elif kept.dtype == torch.bool:
        expected = torch.stack((whole[0, 0], whole[1, 1]))
    elif kept.ndim == 2:
        expected = torch.stack((whole[0, [0, 5]], whole[1, [7, 1]]))
    else:
        expected = whole[:, kept]
    torch.testing.assert_close(theirs(tokens, logits_to_keep=kept).logits, expected)


def test_hidden_states_and_attentions_of_every_layer_pass(ours):
    """Also of more loops than the configuration has; some of them; and as a tuple."""
    model = in_transformers(ours, attn_implementation="eager")
    tokens = random_tokens(2, 7)
    for loops, passes in ((4, 10), (6, 14)):
        output = model(tokens, num_loops=loops, output_hidden_states=True, output_attentions=True)
        assert [x.shape for x in output.hidden_states] == [(2, 7, 48)] * (passes + 1)
        assert [x.shape for x in output.attentions] == [(2, 3, 7, 7)] * passes
    some = model(tokens, output_hidden_states=[0, 2]).hidden_states
    assert [index for index, x in enumerate(some) if x is not None] == [0, 2]
    model.config.output_attentions = True
    assert len(model(tokens).attentions) == 10
    logits, cache, attentions = model(tokens, return_dict=False)
    assert logits.shape == (2, 7, 96)
    assert (len(cache.layers), len(attentions)) == (10, 10)


def test_a_gradient_reaches_recorded_states(ours):
    """Of the layers before the loops; in training only the last loops have gradient."""
    model = in_transformers(ours, attn_implementation="eager").train()
    tokens = random_tokens(2, 7)
    output = model(tokens, labels=tokens, output_hidden_states=True, output_attentions=True)
    for recorded in (output.hidden_states[0], output.attentions[0]):
        recorded.retain_grad()
    output.loss.backward()
    assert output.hidden_states[0].grad.any()
    assert output.attentions[0].grad.any()


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_can_be_resized(tied):
    """With the value embeddings: new ids can be used, and old tokens give the same logits."""
    config = dataclasses.replace(KINDS["parcae"], tied_embeddings=tied)
    model = in_transformers(randomised(config))
    tokens = random_tokens(2, 6, vocabulary=80)
    expected = model(tokens).logits
    model.resize_token_embeddings(110)
    assert model.config.vocab_size == 110
    logits = model(torch.cat((tokens, torch.full((2, 1), 109)), dim=1)).logits
    assert logits.shape == (2, 7, 110)
    torch.testing.assert_close(logits[:, :6, :96], expected, **TOLERANCE)
    head = model.lm_head.weight
    assert (head is model.model.embed_tokens.weight) == tied
    model.post_init()
    assert model.lm_head.weight is head
    model.resize_token_embeddings(80)
    torch.testing.assert_close(model(tokens).logits, expected[..., :80], **TOLERANCE)
    assert {len(table.weight) for table in model.model.value_embeddings.values()} == {80}
    with pytest.raises(ValueError, match=r"multiple of `1\.3`"):
        model.resize_token_embeddings(80, pad_to_multiple_of=1.3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(ours, reentrant):
    """Of all parameters, value embeddings among them, with depths drawn for each row."""
    tokens = random_tokens(4, 8)
    gradients = []
    for checkpointing in (False, True):
        model = in_transformers(ours).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        torch.manual_seed(0)
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-6, rtol=1e-5, msg=name)


def test_gradient_checkpointing_of_frozen_embeddings(ours):
    """As PEFT uses it: inputs of the layers require gradient though no embedding does."""
    model = in_transformers(ours).train()
    model.requires_grad_(False)
    model.model.coda.requires_grad_(True)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    tokens = random_tokens(2, 8)
    model(tokens, labels=tokens).loss.backward()
    assert model.model.coda.layers[0].mlp.fc.weight.grad.any()
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_embeddings_as_inputs(theirs):
    """Those of tokens give the logits of their ids; others need the ids, which values use."""
    tokens = random_tokens(2, 6)
    embedded = theirs.get_input_embeddings()(tokens)
    expected = theirs(tokens).logits
    torch.testing.assert_close(theirs(inputs_embeds=embedded).logits, expected, **TOLERANCE)
    both = theirs(input_ids=tokens, inputs_embeds=embedded).logits
    torch.testing.assert_close(both, expected, **TOLERANCE)
    with pytest.raises(ValueError, match="Give input_ids too"):
        theirs(inputs_embeds=embedded + 0.1)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        theirs()


def test_any_embeddings_without_value_embeddings():
    model = in_transformers(randomised(KINDS["rdm"]))
    assert model(inputs_embeds=torch.randn(1, 4, 48)).logits.shape == (1, 4, 96)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_mask_for_every_pair_of_positions(ours, implementation):
    """Three continuations of one prefix in one row, by a mask and positions of their own."""
    model = in_transformers(ours, attn_implementation=implementation)
    prefix, ends = random_tokens(1, 4), random_tokens(3, 2, seed=1)
    expected = model(torch.cat((prefix.expand(3, 4), ends), dim=1)).logits[:, 4:]
    row = torch.cat((prefix, ends.reshape(1, 6)), dim=1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5, 4, 5]])
    allowed = torch.ones(10, 10, dtype=torch.bool).tril()
    for first in (4, 6, 8):
        allowed[first : first + 2, 4:first] = False
    mask = torch.zeros(1, 1, 10, 10).masked_fill(~allowed, torch.finfo(torch.float32).min)
    actual = model(row, attention_mask=mask, position_ids=positions).logits[0, 4:]
    torch.testing.assert_close(actual.reshape(3, 2, 96), expected, **TOLERANCE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_sequences(ours, implementation):
    """Sequences in one row, told apart by their positions, give what each gives alone."""
    model = in_transformers(ours, attn_implementation=implementation)
    first, second = random_tokens(1, 5), random_tokens(1, 3, seed=1)
    expected = torch.cat((model(first).logits, model(second).logits), dim=1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    packed = torch.cat((first, second), dim=1)
    actual = model(packed, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_depths_of_rows_with_padding_and_positions(theirs):
    """Rows are sorted by depth inside; masks and positions go with them."""
    tokens = random_tokens(3, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [2]])).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = theirs(
        tokens, attention_mask=mask, position_ids=positions, num_loops=[1, 6, 3]
    ).logits
    for row, loops in enumerate([1, 6, 3]):
        alone = theirs(tokens[row : row + 1, 9 - mask[row].sum() :], num_loops=loops).logits
        torch.testing.assert_close(together[row, 9 - mask[row].sum() :], alone[0], **TOLERANCE)


def test_attention_functions_can_be_changed(ours, theirs):
    """With `set_attn_implementation`, and to one registered from outside."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen = []

    def counting(module, *args, **kwargs):
        seen.append((module.layer_idx, kwargs["extra"]))
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("counting", counting)
    AttentionMaskInterface.register("counting", sdpa_mask)
    model, tokens = in_transformers(ours), random_tokens(2, 6)
    expected = theirs(tokens).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens).logits, expected, **TOLERANCE)
    model.set_attn_implementation("counting")
    torch.testing.assert_close(model(tokens, extra="passed").logits, expected, **TOLERANCE)
    order = [0, *range(2, 10), 1]  # prelude, four loops of two layers, coda
    assert seen == [(slot, "passed") for slot in order]


@pytest.mark.slow
def test_flex_attention(ours):
    """Also with depths of rows, though its masks cannot be indexed by row."""
    model = in_transformers(ours, attn_implementation="flex_attention")
    tokens, mask = random_tokens(3, 8), torch.ones(3, 8)
    mask[1, 5:] = 0
    for loops in (3, [2, 3, 1]):
        options = {"attention_mask": mask, "num_loops": loops, "use_cache": False}
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling takes a minute
            actual = model(tokens, **options).logits
            expected = in_transformers(ours)(tokens, **options).logits
        torch.testing.assert_close(actual[mask > 0], expected[mask > 0], **TOLERANCE)


def test_labels_that_are_already_shifted(theirs):
    tokens = random_tokens(2, 8)
    shifted = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    expected = theirs(tokens, labels=tokens).loss
    actual = theirs(tokens, labels=torch.zeros_like(tokens), shift_labels=shifted).loss
    torch.testing.assert_close(actual, expected)


def test_weights_of_a_part_of_a_module_are_kept(tmp_path, theirs):
    """Of the injection's three parameters one is missing; the others are not filled again."""
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.core.injection.B"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = ParcaeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.core.injection.B"}
    assert torch.equal(loaded.model.core.injection.B, torch.eye(48))
    for name in ("log_A", "dt_bias"):
        kept = weights[f"model.core.injection.{name}"]
        assert torch.equal(getattr(loaded.model.core.injection, name), kept)


@pytest.mark.parametrize("init", ["scaled-zero", "scaled"])
def test_all_weights_can_be_filled(theirs, init):
    """A model from an empty checkpoint is one that was created: no weight is left as it was."""
    config = copy.deepcopy(theirs.config)
    config.init = init
    models = []
    for build in (
        lambda: ParcaeForCausalLM(config),
        lambda: ParcaeForCausalLM.from_pretrained(None, config=config, state_dict={}),
    ):
        torch.manual_seed(0)
        models.append(build().state_dict())
    created, filled = models
    assert created.keys() == filled.keys()
    for name, tensor in created.items():
        assert filled[name].std() == pytest.approx(tensor.std().item(), rel=0.2, abs=1e-6), name


@pytest.mark.slow
def test_the_body_loads_into_the_model_with_a_head_and_back(theirs, tmp_path):
    theirs.model.save_pretrained(tmp_path / "body")
    with_head, info = ParcaeForCausalLM.from_pretrained(tmp_path / "body", output_loading_info=True)
    assert not info["missing_keys"]  # the head is the embedding
    tokens = random_tokens(2, 6)
    assert torch.equal(with_head(tokens).logits, theirs(tokens).logits)
    theirs.save_pretrained(tmp_path / "whole")
    body = ParcaeModel.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(body(tokens).last_hidden_state, theirs.model(tokens).last_hidden_state)


def test_shapes_that_do_not_fit(theirs, tmp_path):
    """An error, or with `ignore_mismatched_sizes` initial values."""
    theirs.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        ParcaeForCausalLM.from_pretrained(tmp_path, vocab_size=50)
    model = ParcaeForCausalLM.from_pretrained(tmp_path, vocab_size=50, ignore_mismatched_sizes=True)
    assert model(random_tokens(1, 4, vocabulary=50)).logits.shape == (1, 4, 50)


def test_a_model_on_the_meta_device(theirs):
    with torch.device("meta"):
        model = ParcaeForCausalLM(theirs.config)
    assert all(parameter.is_meta for parameter in model.parameters())
