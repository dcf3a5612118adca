"""`save_pretrained` and `push_to_hub`: folders that load as exported ones do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM

import parcae
from hub_models import in_transformers, ours, random_tokens, theirs  # noqa: F401
from parcae.hub.modeling_parcae import ParcaeForCausalLM
from parcae.hub.remote_code import AUTO_MAP, remote_code

SAVED = {"config.json", "generation_config.json", "model.safetensors", *remote_code()}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_modelling_code_is_saved_with_a_model(theirs, tmp_path):
    """The same files as in an exported folder, also when a loaded model is saved again."""
    theirs.save_pretrained(tmp_path / "first")
    ParcaeForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for name in ("first", "second"):
        saved = files(tmp_path / name)
        assert saved.keys() == SAVED
        assert json.loads(saved["config.json"])["auto_map"] == AUTO_MAP
        for code, text in remote_code().items():
            assert saved[code].decode() == text


def test_a_configuration_alone_is_saved_with_its_code(theirs, tmp_path):
    theirs.config.save_pretrained(tmp_path)
    assert files(tmp_path).keys() == {"config.json", *remote_code()}
    assert AutoConfig.from_pretrained(tmp_path).num_loops == theirs.config.num_loops


def test_a_saved_model_is_read_by_this_package(ours, theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "saved")
    weights = parcae.load(tmp_path / "saved").state_dict()
    for name, expected in ours.state_dict().items():
        assert torch.equal(weights[name], expected), name


def test_push_to_hub(theirs, tmp_path, monkeypatch):
    """What is uploaded is a folder that can be loaded. The hub is a folder here."""
    import transformers.utils.hub

    class Hub:
        def create_repo(self, name, **options):
            return SimpleNamespace(repo_id=name)

        def create_commit(self, repo_id, operations, **options):
            for operation in operations:
                target = tmp_path / repo_id / operation.path_in_repo
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(Path(operation.path_or_fileobj).read_bytes())

    def no_card(*args, **options):
        raise EntryNotFoundError("README.md")

    monkeypatch.setattr(transformers.utils.hub, "hf_api", Hub)
    monkeypatch.setattr(ModelCard, "load", no_card)
    theirs.push_to_hub("someone/model")
    uploaded = tmp_path / "someone" / "model"
    assert files(uploaded).keys() == {"README.md", *SAVED}
    loaded = AutoModelForCausalLM.from_pretrained(uploaded)
    tokens = random_tokens(2, 6)
    assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_types_are_kept(ours, dtype, tmp_path):
    wanted = getattr(torch, dtype)
    in_transformers(ours).to(wanted).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {wanted}
    given = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    assert {parameter.dtype for parameter in given.parameters()} == {torch.float16}
