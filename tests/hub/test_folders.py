"""Exported folders, read by transformers with and without this package, and imported ones."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import parcae
from conftest import randomised, tiny
from hub_models import in_transformers
from parcae.cli import main
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.scorer import open_scorer
from parcae.hub.import_model import download_model
from parcae.hub.remote_code import remote_code
from parcae.model.store import save

pytestmark = pytest.mark.slow

TEXTS = ["the cat sat on a mat", "one dog ran far away", "rain and light"]
DATA = os.environ.get("PARCAE_TEST_DATA")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(randomised(tiny(vocab_size=320)), folder)
    Tokenizer.train(TEXTS * 30, size=300).save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory) -> Path:
    return parcae.export(checkpoint, tmp_path_factory.mktemp("export") / "model")


def test_files_of_an_exported_folder(exported):
    assert sorted(path.name for path in exported.iterdir()) == [
        "README.md",
        "config.json",
        "configuration_parcae.py",
        "generation_config.json",
        "model.safetensors",
        "modeling_parcae.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not [path for path in exported.parent.iterdir() if path.name.startswith(".")]


def test_auto_classes_after_import(checkpoint, exported):
    """Model and tokenizer as in this package; no code of the folder is run."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    assert AutoConfig.from_pretrained(exported).num_hidden_layers == 1 + 4 * 2 + 1
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert type(model).__module__ == "parcae.hub.modeling_parcae"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ours = parcae.open_checkpoint(checkpoint)
    for text in (*TEXTS, "a <|bos|> in a text", ""):
        expected = [ours.tokenizer.bos, *ours.tokenizer.encode(text)]
        assert tokenizer(text, split_special_tokens=True)["input_ids"] == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == text
    tokens = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    expected = ours.model(tokens, loops=3, state="zero").logits
    torch.testing.assert_close(model(tokens, num_loops=3).logits, expected, atol=1e-5, rtol=1e-5)


FRESH = """
import sys
sys.modules["parcae"] = None  # importing it is an error
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
text, exported, saved = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
tokens = tokenizer(text, return_tensors="pt")["input_ids"]
for folder in (exported, saved):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    torch.save(model(tokens, num_loops=3).logits, folder + "/logits.pt")
    output = model.generate(tokens, max_new_tokens=12, do_sample=False, num_loops=3)
    print(tokenizer.decode(output[0][len(tokens[0]):]))
generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
print(generate(text, max_new_tokens=12, do_sample=False)[0]["generated_text"])
model.save_pretrained(saved + "/again")
"""


@pytest.mark.slow
def test_a_fresh_process_without_the_package(checkpoint, tmp_path):
    """Exported, and saved by transformers: the same model. Saved again there, it loads here."""
    from transformers import AutoModelForCausalLM

    exported, saved = parcae.export(checkpoint, tmp_path / "exported"), tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(exported).save_pretrained(saved)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    process = subprocess.run(
        [sys.executable, "-c", FRESH, TEXTS[0], str(exported), str(saved)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    model, tokenizer, _ = parcae.open_checkpoint(checkpoint)
    tokens = torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXTS[0])]])
    expected = model(tokens, loops=3, state="zero").logits
    for folder in (exported, saved):
        actual = torch.load(folder / "logits.pt")
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    engine = parcae.Engine(model, tokenizer)
    text = engine.generate(TEXTS[0], max_new_tokens=12, loops=3, temperature=0).text
    piped = engine.generate(TEXTS[0], max_new_tokens=12, temperature=0).text
    assert process.stdout == f"{text}\n{text}\n{TEXTS[0]}{piped}\n"
    names = {path.name for path in (saved / "again").iterdir()}
    assert names == {path.name for path in saved.iterdir()} - {"again", "logits.pt"}
    again = AutoModelForCausalLM.from_pretrained(saved / "again")
    torch.testing.assert_close(again(tokens, num_loops=3).logits, expected, atol=1e-5, rtol=1e-5)


def test_the_modelling_file_is_self_contained():
    """It imports nothing of this package, and names everything it uses."""
    import ast

    text = remote_code()["modeling_parcae.py"]
    tree = ast.parse(text)
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if name.split(".")[0] == "parcae"]
    assert {name.split(".")[0] for name in modules if name} <= {
        *sys.stdlib_module_names,
        "torch",
        "transformers",
        "configuration_parcae",
    }


def test_load_and_import_read_an_exported_folder(checkpoint, exported, tmp_path):
    expected = parcae.load(checkpoint).state_dict()
    imported = parcae.import_model(exported, tmp_path / "imported")
    for folder in (exported, imported):
        weights = parcae.load(folder).state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert parcae.open_checkpoint(imported).tokenizer.encode(TEXTS[0])


@pytest.fixture
def sharded(exported, tmp_path) -> Path:
    """As transformers saves a model whose weights are large, with the tokenizer of the export."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(exported).save_pretrained(folder, max_shard_size="100KB")
    (folder / "tokenizer.json").write_bytes((exported / "tokenizer.json").read_bytes())
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert not (folder / "model.safetensors").exists()
    return folder


def test_weights_in_several_files(checkpoint, sharded, tmp_path):
    """They load, import, generate and score as those in one file."""
    expected = parcae.load(checkpoint).state_dict()
    imported = parcae.import_model(sharded, tmp_path / "imported")
    for folder in (sharded, imported):
        weights = parcae.load(folder).state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert main(["generate", str(sharded), "the", "--max-new-tokens", "2"]) == 0
    assert open_scorer(sharded).encode("the")


def change_index(**changes):
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        content["weight_map"] |= changes
        path.write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_index(**{"model.norm.weight": "../model.safetensors"}), "not the name of a file"),
        (change_index(**{"model.norm.weight": "/dev/zero"}), "not the name of a file"),
        (change_index(**{"model.norm.weight": 3}), "3 is not the name of a file"),
        (change_index(**{"model.norm.weight": "model.bin"}), "not the name of a file"),
        (change_index(extra="no.safetensors"), "no.safetensors: no such file"),
        (change_index(**{"model.norm.weight": "no.safetensors"}), "'model.norm.weight' of model-"),
        (lambda f: os.mkfifo(f / "x.safetensors") or change_index(x="x.safetensors")(f), "a pipe"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "no weight_map"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "not valid JSON"),
    ],
)
def test_a_wrong_or_malicious_index_is_refused(damage, message, sharded):
    damage(sharded)
    with pytest.raises(parcae.FileError, match=message):
        parcae.load(sharded)


def test_number_formats(checkpoint, tmp_path):
    folder = parcae.export(checkpoint, tmp_path / "half", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="PARCAE_TEST_DATA is not set")
@pytest.mark.parametrize("name", ["parcae-tiny", "rdm-prenorm-tiny", "gpt-tiny"])
def test_a_release_folder_through_import_and_transformers(name, tmp_path):
    """The logits are those that the release computed."""
    source = Path(DATA or "") / "fixtures" / name
    model = parcae.load(parcae.import_model(source, tmp_path / "imported"))
    theirs = in_transformers(model)
    golden = load_file(source / "golden.safetensors")
    tokens = golden["input_ids"].long()
    for key in (key for key in golden if key.startswith("logits")):
        loops = int(key.removeprefix("logits_T")) if key != "logits" else 1
        given = {"loops": loops, "state": "zero"} if key != "logits" else {}
        with torch.no_grad():
            actual = theirs(tokens, num_loops=loops).logits
            ours = model(tokens, **given).logits
        torch.testing.assert_close(actual, ours, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(actual, golden[key], atol=1e-4, rtol=1e-4)


def test_the_commands(checkpoint, tmp_path, capsys):
    folder, copy = tmp_path / "exported", tmp_path / "copy"
    assert main(["export", str(checkpoint), str(folder)]) == 0
    assert main(["import", str(folder), str(copy)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {folder}", f"wrote {copy}"]
    assert main(["export", str(checkpoint), str(folder)]) == 2
    assert "exists. Choose another folder" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "nothing"), str(tmp_path / "new")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_repository_that_does_not_exist(monkeypatch, tmp_path):
    """The authors' cards name `parcae-small-140m`; the message names the repository that exists."""
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def missing(*args, **options):
        raise RepositoryNotFoundError(
            "404", response=httpx2.Response(404, request=httpx2.Request("GET", "https://hub"))
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    with pytest.raises(parcae.FileError, match=r"The repository is SandyResearch/parcae-140m\."):
        download_model("SandyResearch/parcae-small-140m", tmp_path)
    with pytest.raises(parcae.FileError, match="Check the name"):
        download_model("someone/else", tmp_path)


class Harmful:
    def __reduce__(self):
        return (os.mkdir, ("harmed",))


def damage_config(**changes):
    def apply(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **changes}))

    return apply


def damage_weights(change):
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def put_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps({"_class_name": "GPTConfig"}))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Harmful()))
        archive.writestr("archive/version", "3")
    (folder / "pytorch_model.bin").write_bytes(content.getvalue())


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_weights(lambda w: w.pop(NORM)), "missing coda.norm.weight"),
        (damage_weights(lambda w: w.update(extra=torch.zeros(1))), "unexpected extra"),
        (damage_weights(lambda w: w.update({NORM: torch.zeros(7)})), r"coda.norm.weight is \[7\]"),
        (put_pickle, "cannot be read as plain tensors"),
        (damage_config(hidden_size="wide"), "model.width"),
        (damage_config(hidden_size=50), "heads"),
        (damage_config(injection="unknown"), "injection"),
        (damage_config(num_core_layers=-1), "core_layers"),
        (damage_config(num_core_layers=9_000), "9,002 layers, but the weights have"),
        (damage_config(num_core_layers=10**7), "core_layers"),
        (damage_config(hidden_size=10**9), "model.width"),
        (damage_config(vocab_size=10**30), "vocab_size"),
        (damage_config(max_position_embeddings=10**12), "context_length"),
        (damage_config(mean_loops=10**12), "mean_loops"),
        (damage_config(model_type="llama"), "neither a parcae checkpoint"),
        (lambda folder: (folder / "config.json").write_text("[1"), "not valid JSON"),
    ],
)
def test_a_wrong_or_malicious_folder_is_refused(damage, message, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = parcae.export(checkpoint, tmp_path / "model")
    damage(folder)
    with pytest.raises((parcae.FileError, parcae.ConfigError), match=message):
        parcae.import_model(folder, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_config(num_loops=10**9), "100,000 layers at most"),
        (damage_config(num_core_layers=10**9), "100,000 layers at most"),
        (damage_config(num_loops=0), "num_loops: 0"),
        (damage_config(num_loops="many"), r"num_loops'?:\s.*expected int, got str"),
        (damage_config(hidden_size=48.5), r"hidden_size'?:\s.*expected int, got float"),
        (damage_config(norm="post"), r"norm'?:\s.*one of"),
        (damage_config(head_dim=7), "head_dim: 7"),
        (damage_config(injection="unknown"), "injection: 'unknown'"),
        (damage_weights(lambda w: w.update({NORM: torch.zeros(7)})), "(?i)mismatch"),
    ],
)
def test_a_wrong_folder_is_refused_by_the_auto_classes(damage, message, checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = parcae.export(checkpoint, tmp_path / "model")
    damage(folder)
    with pytest.raises(Exception, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_code_of_a_folder_runs_only_if_asked_for(checkpoint, tmp_path):
    """Neither this package nor the Auto classes after `import parcae` run it."""
    from transformers import AutoModelForCausalLM

    folder = parcae.export(checkpoint, tmp_path / "model")
    for name in remote_code():
        (folder / name).write_text(f"open({str(tmp_path / 'harmed')!r}, 'w')")
    AutoModelForCausalLM.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    parcae.load(folder)
    parcae.import_model(folder, tmp_path / "imported")
    assert not (tmp_path / "harmed").exists()


def test_an_exported_folder_is_evaluated_as_one_of_ours(exported, capsys):
    assert (
        main(["generate", str(exported), "the cat", "--max-new-tokens", "4", "--loops", "2"]) == 0
    )
    scorer = open_scorer(str(exported), [1, 2])
    assert scorer.loops == (1, 2)


@pytest.mark.slow
def test_the_harness_gives_the_same_likelihoods(checkpoint, exported):
    """`lm_eval --model hf` and this package's adapter."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from parcae.evaluation.harness import ParcaeLM

    pairs = [("the cat", " sat on a mat"), ("one dog", " ran"), ("rain", " and light")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    theirs = HFLM(pretrained=str(exported), trust_remote_code=True, device="cpu", batch_size=2)
    ours = ParcaeLM(str(checkpoint)).loglikelihood(requests)
    for (loss, greedy), (expected, their_greedy) in zip(
        theirs.loglikelihood(requests), ours, strict=True
    ):
        assert loss == pytest.approx(expected, abs=1e-4)
        assert greedy == their_greedy


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    command, checkpoint, tmp_path, monkeypatch, capsys
):
    def full(*_arguments, **_options):
        raise SafetensorError('IoError(Os { message: "No space left on device" })')

    monkeypatch.setattr("parcae.model.store.save_file", full)
    assert main([command, str(checkpoint), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No space left" in error
    assert list(tmp_path.iterdir()) == []
