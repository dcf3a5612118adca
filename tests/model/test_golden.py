"""The reference implementation's own outputs, reproduced through the importer."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import parcae
import reference
from parcae.files import FileError
from parcae.model import release_format
from parcae.model.release_format import our_name

LOOPED = ("parcae-tiny", "rdm-prenorm-tiny")
RELEASED = (*LOOPED, "gpt-tiny") if os.environ.get("PARCAE_TEST_DATA") else ()
HEADER = {
    "_class_name": "ParcaeConfig",
    "block_size": 64,
    "n_embd": 48,
    "intermediate_size": 192,
    "num_attention_heads": 3,
    "vocab_size": 256,
    "qk_norm": True,
    "prelude_norm": True,
    "tie_embeddings": True,
    "injection_type": "diagonal",
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "recurrent_embedding_dimension": 48,
    "recurrent_intermediation_embedding_dimension": 192,
    "sampling_scheme": "poisson-truncated-full",
    "mean_recurrence": 8,
    "mean_backprop_depth": 4,
    "recurrent_iteration_method": "per-sequence",
    "state_init": "zero",
}


def release_name(name: str) -> str:
    """The inverse of `our_name`."""
    singles = {ours: key for key, ours in release_format._SINGLE.items()}
    singles["coda.norm.weight"] = "transformer.ln_f.weight"
    if name in singles:
        return singles[name]
    if match := re.fullmatch(r"value_tables\.(\d+)\.weight", name):
        return f"value_embeds.{match[1]}.weight"
    match = re.fullmatch(r"(.+)\.(\d+)\.((?:norm|attn|mlp).+)\.weight", name)
    assert match is not None, name
    stacks, parts = (
        {v: k for k, v in t.items()} for t in (release_format._STACK, release_format._BLOCK)
    )
    return f"transformer.{stacks[match[1]]}.{match[2]}.{parts[match[3]]}.weight"


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory):
    """A model of ours in the release's format, for what needs the format and no golden outputs."""
    folder = tmp_path_factory.mktemp("release")
    config = release_format._translate(HEADER, {"value_tables.1.weight": torch.empty(0)}, (1, 3, 5))
    weights = {release_name(k): v.clone() for k, v in parcae.create(config).state_dict().items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    (folder / "config.json").write_text(json.dumps(HEADER))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


@pytest.fixture(params=["synthetic", *RELEASED])
def any_release(request):
    if request.param == "synthetic":
        return request.getfixturevalue("synthetic")
    return request.getfixturevalue("shared_data") / "fixtures" / request.param


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOOPED, "gpt-tiny"])
def test_logits_loss_and_every_gradient(name, shared_data):
    folder = shared_data / "fixtures" / name
    golden = load_file(folder / "golden.safetensors")
    model = parcae.load(folder)
    tokens = golden["input_ids"]
    with torch.no_grad():
        if name in LOOPED:
            for loops in (1, 2, 4, 8, 16):
                logits = model(tokens, loops=loops).logits
                assert (logits - golden[f"logits_T{loops}"]).abs().max() < 1e-4, loops
        else:
            assert (model(tokens).logits - golden["logits"]).abs().max() < 1e-4

    depths = {"loops": golden["depths"]} if name in LOOPED else {}
    loss = model(tokens, targets=golden["labels"], **depths).loss
    assert abs(loss - golden["loss"]) < 1e-5
    loss.backward()
    parameters = dict(model.named_parameters())
    kind = "ParcaeConfig" if name in LOOPED else "GPTConfig"
    for key in (k for k in golden if k.startswith("grad.")):
        expected = golden[key]
        gradient = parameters.pop(our_name(key.removeprefix("grad."), kind)).grad
        assert (gradient - expected).abs().max() < 1e-4 * expected.abs().max(), key
    assert not parameters, "a parameter without a golden gradient"


def copy(folder, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    for file in ("config.json", "pytorch_model.bin"):
        shutil.copyfile(folder / file, target / file)
    return target


def weights_of(folder):
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def test_reads_safetensors_too(any_release, tmp_path):
    folder = any_release
    target = copy(folder, tmp_path)
    weights = {k: v.clone() for k, v in weights_of(folder).items()}
    (target / "pytorch_model.bin").unlink()
    save_file(weights, target / "model.safetensors")
    before, after = parcae.load(folder).state_dict(), parcae.load(target).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_missing_and_left_over_keys_are_errors(any_release, tmp_path):
    folder = any_release
    target = copy(folder, tmp_path)
    weights = weights_of(folder)
    removed = next(k for k in weights if k.endswith("mlp.proj.weight"))
    torch.save({k: v for k, v in weights.items() if k != removed}, target / "pytorch_model.bin")
    with pytest.raises(FileError, match=f"missing {our_name(removed)}"):
        parcae.load(target)
    torch.save(
        {**weights, "transformer.extra.weight": torch.zeros(2)}, target / "pytorch_model.bin"
    )
    with pytest.raises(FileError, match=r"transformer\.extra\.weight"):
        parcae.load(target)
    deep = removed.replace(".0.", ".9.")
    torch.save({**weights, deep: weights[removed]}, target / "pytorch_model.bin")
    with pytest.raises(FileError, match="unexpected"):
        parcae.load(target)


def test_untied_head_that_claims_to_be_tied_is_an_error(any_release, tmp_path):
    folder = any_release
    target = copy(folder, tmp_path)
    weights = weights_of(folder)
    torch.save(
        {**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, target / "pytorch_model.bin"
    )
    with pytest.raises(FileError, match="tie_embeddings"):
        parcae.load(target)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_softcap", 30.0),
        ("injection_type", "gated"),
        ("mlp_class_name", "Mixture"),
        ("init_strategy", "takase"),
        ("_class_name", "OtherConfig"),
        ("rope_settings", {"use_rope": False}),
        ("state_init", "unit"),
    ],
)
def test_settings_we_do_not_implement_are_errors(synthetic, tmp_path, key, value):
    target = copy(synthetic, tmp_path)
    header = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**header, key: value}))
    with pytest.raises(FileError, match=key):
        parcae.load(target)


def test_a_pickle_that_runs_code_is_refused(synthetic, tmp_path):
    class Attack:
        def __reduce__(self):
            return (print, ("arbitrary code",))

    target = copy(synthetic, tmp_path)
    torch.save({"transformer.wte.weight": Attack()}, target / "pytorch_model.bin")
    with pytest.raises(FileError, match="plain tensors"):
        parcae.load(target)


LAYOUTS = [(2, 2, 2), (1, 1, 1), (3, 1, 2), (2, 3, 2), (0, 2, 0), (1, 4, 1)]


@pytest.mark.parametrize("layers", LAYOUTS)
@pytest.mark.parametrize(("mean", "backprop"), [(8, 4), (5, 3)])
def test_every_placement_of_the_loop(synthetic, tmp_path, layers, mean, backprop):
    """The release numbers layers differently for tables and gates; what lacks its other half is
    dead there. Build such a file from the fixture's tensors, and compare with the live parts."""
    target = copy(synthetic, tmp_path)
    header = json.loads((target / "config.json").read_text())
    names = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
    header |= dict(zip(names, layers, strict=True))
    header |= {"mean_recurrence": mean, "mean_backprop_depth": backprop}
    (target / "config.json").write_text(json.dumps(header))
    source = weights_of(target)
    weights = {k: v for k, v in source.items() if ".0." not in k and ".1." not in k}
    weights = {k: v for k, v in weights.items() if not k.startswith("value_embeds")}
    prelude, core, coda = layers
    numbers = [(f"prelude.{i}", i) for i in range(prelude)]
    numbers += [(f"core_block.{i}", prelude + i) for i in range(core)]
    numbers += [(f"coda.{i}", prelude + core * mean + i) for i in range(coda)]
    live = []
    for layer, (name, number) in enumerate(numbers):
        for part in (k for k in source if k.startswith("transformer.prelude.0.")):
            weights[part.replace("prelude.0", name)] = source[part]
        has_table = layer % 2 == (sum(layers) - 1) % 2
        has_gate = number % 2 == (core * backprop - 1) % 2
        if has_table:
            weights[f"value_embeds.{layer}.weight"] = source["value_embeds.1.weight"]
        if has_gate:
            gate = source["transformer.prelude.1.attn.ve_gate.weight"]
            weights[f"transformer.{name}.attn.ve_gate.weight"] = gate
        live += [layer] if has_table and has_gate else []
    torch.save(weights, target / "pytorch_model.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parcae.load(target)
    assert [x for x in range(sum(layers)) if model.config.has_value_embedding(x)] == live
    tokens = torch.arange(12).view(2, 6)
    depths = parcae.Depths((2, 3), (1, 1))
    with torch.no_grad():
        ours = model(tokens, loops=depths).logits
        oracle = reference.forward(model, tokens, None, depths, torch.zeros(2, 6, 48))
    assert torch.allclose(ours, oracle, atol=1e-4)


def test_readout_and_tables_are_not_optional(synthetic, tmp_path):
    folder = synthetic
    target = copy(folder, tmp_path)
    for gone in ("transformer.C.weight", "value_embeds"):
        kept = {k: v for k, v in weights_of(folder).items() if not k.startswith(gone)}
        torch.save(kept, target / "pytorch_model.bin")
        with pytest.raises(FileError, match="missing"):
            parcae.load(target)
