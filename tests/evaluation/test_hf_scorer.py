"""Models of the transformers library as scorers."""

from __future__ import annotations

import io
import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evaluation_fixtures import score_all
from parcae import cli
from parcae.evaluation.hf_scorer import HFScorer, tokenizer_fingerprint
from parcae.evaluation.prompts import Span, continuations, cut_left
from parcae.evaluation.scorer import is_transformers_model, open_scorer

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request, small_tokenizer, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    kind = transformers.GPT2Config if request.param == "gpt2" else transformers.LlamaConfig
    names = {
        "gpt2": {"n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 2},
        "llama": {
            "max_position_embeddings": 48,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    }[request.param]
    config = kind(vocab_size=small_tokenizer.vocab_size, bos_token_id=0, eos_token_id=1, **names)
    model = transformers.AutoModelForCausalLM.from_config(config)
    out = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(out)
    path = out / "plain.json"
    small_tokenizer.save(path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token="<|bos|>", eos_token="<|eos|>"
    ).save_pretrained(out)
    return out


@pytest.mark.slow
def test_batches_equal_each_sequence_alone(folder: Path):
    scorer = HFScorer.open(str(folder), batch_tokens=70)
    assert scorer.context_length == 48
    prompts = [
        continuations("the cat sat on a mat", [" and saw", " one dog run"], scorer),
        continuations("one dog", [" run far"], scorer),
        cut_left([scorer.encode("rain in light " * 40)], [Span(100, 110)], 48),
    ]
    for prompt, answers in zip(prompts, score_all(scorer, prompts), strict=True):
        for tokens, span, answer in zip(prompt.sequences, prompt.spans, answers, strict=True):
            with torch.no_grad():
                logits = scorer.model(torch.tensor([tokens[:48]])).logits[0]
            logits = logits[span.start - 1 : span.end - 1].float()
            wanted = torch.tensor(tokens[span.start : span.end])
            nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
            assert torch.allclose(answer.nats[0].float(), nats, atol=1e-5)


@pytest.mark.slow
def test_a_transformers_model_is_evaluated(folder: Path, task_folder: Path, tmp_path: Path):
    assert is_transformers_model(folder)
    arguments = [
        "eval",
        str(folder),
        "--suites",
        "core",
        "lambada",
        "--task-data",
        str(task_folder),
    ]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["looped"]
    assert result["suites"]["core"]["tasks_scored"] == 4


def test_a_name_that_cannot_be_opened(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["eval", "nobody/nothing", "--out", str(tmp_path)]) == 2
    assert "nobody/nothing" in capsys.readouterr().err
    assert not is_transformers_model(tmp_path)


@pytest.mark.slow
def test_loops_are_refused_without_a_loop(folder: Path):
    with pytest.raises(ValueError, match="the depth and from the state"):
        open_scorer(folder, [8])


@pytest.mark.slow
def test_options_of_parcae_models_are_refused(folder: Path, tmp_path: Path, capsys):
    for arguments in (["--state", "like-init"], ["--tokenizer", "x.json"], ["--best"]):
        assert cli.main(["eval", str(folder), "--out", str(tmp_path), *arguments]) == 2
        assert arguments[0].strip("-") in capsys.readouterr().err


@pytest.mark.slow
def test_another_tokenizer_is_another_model(folder: Path):
    """With other merges, the same weights read other tokens."""
    scorer = HFScorer.open(str(folder))
    before = tokenizer_fingerprint(scorer.tokenizer)
    assert before == tokenizer_fingerprint(HFScorer.open(str(folder)).tokenizer)
    assert before in open_scorer(folder).identity
    scorer.tokenizer.backend_tokenizer.normalizer = pytest.importorskip(
        "tokenizers"
    ).normalizers.Lowercase()
    assert before != tokenizer_fingerprint(scorer.tokenizer)


def test_a_bidirectional_model_is_refused(small_tokenizer):
    config = transformers.BertConfig(
        vocab_size=small_tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
    )
    for is_decoder in (False, True):
        torch.manual_seed(0)
        config.is_decoder = is_decoder
        model = transformers.BertLMHeadModel(config)
        tokenizer = SimpleNamespace(
            bos_token_id=0, eos_token_id=1, model_max_length=48, encode=lambda text, **_: [5]
        )
        if is_decoder:
            HFScorer(model, tokenizer)
        else:
            with pytest.raises(ValueError, match="not a causal model"):
                HFScorer(model, tokenizer)


@pytest.mark.slow
def test_a_context_for_a_model_that_states_none(folder: Path):
    scorer = HFScorer.open(str(folder))
    silent = SimpleNamespace(
        config=SimpleNamespace(), eval=lambda: scorer.model, forward=scorer.model.forward
    )
    scorer.tokenizer.model_max_length = 10**30
    with pytest.raises(ValueError, match="Give `context_length`"):
        HFScorer(silent, scorer.tokenizer)
    assert HFScorer(silent, scorer.tokenizer, context_length=20).context_length == 20
    assert open_scorer(folder, context=24).context_length == 24


@pytest.mark.slow
def test_a_looped_model_of_transformers(small_tokenizer, tmp_path, capsys):
    """It is scored at the depth of its configuration; another one cannot be asked for."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    config = transformers.HrmTextConfig(
        vocab_size=small_tokenizer.vocab_size,
        num_key_value_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=48,
        bos_token_id=0,
        eos_token_id=1,
        **sizes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    small_tokenizer.save(tmp_path / "plain.json")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "plain.json"), bos_token="<|bos|>", eos_token="<|eos|>"
    ).save_pretrained(tmp_path)
    scorer = HFScorer.open(str(tmp_path))
    prompt = continuations("the cat", [" sat on"], scorer)
    [[answer]] = score_all(scorer, [prompt])
    tokens, span = torch.tensor(prompt.sequences), prompt.spans[0]
    expected = model(tokens, labels=tokens).logits[0, span.start - 1 : span.end - 1]
    losses = torch.nn.functional.cross_entropy(expected, tokens[0, slice(*span)], reduction="none")
    torch.testing.assert_close(answer.nats[0].float(), losses, atol=1e-4, rtol=1e-4)
    assert cli.main(["eval", str(tmp_path), "--loops", "4", "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "the depth" in message
    assert "no loop" not in message


def test_a_broken_folder_gives_one_line(folder: Path, tmp_path: Path, capsys):
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"nothing")
    assert cli.main(["eval", str(tmp_path / "broken"), "--out", str(tmp_path)]) == 2
    assert "that transformers can open" in capsys.readouterr().err


def test_logits_of_one_pass_are_in_memory(folder: Path, monkeypatch):
    """The logits of a pass are released before the next one."""
    scorer = HFScorer.open(str(folder), batch_tokens=8)
    made = []
    inner = scorer._logits

    def logits(rows, kept):
        assert all(one() is None for one in made)
        found = inner(rows, kept)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(scorer, "_logits", logits)
    scorer.score([continuations("the cat sat", [" on a mat", " and saw", " run"], scorer)])
    assert len(made) > 1


@pytest.fixture
def with_code(folder: Path, tmp_path: Path) -> Path:
    """A model whose class is in its own folder; importing that leaves a file behind."""
    out = tmp_path / "with_code"
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    base = {"gpt2": "GPT2", "llama": "Llama"}[config["model_type"]]
    config |= {"model_type": "own-kind", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (out / "config.json").write_text(json.dumps(config))
    model = "GPT2LMHeadModel" if base == "GPT2" else "LlamaForCausalLM"
    (out / "own.py").write_text(
        f"from transformers import {base}Config, {model}\n"
        f"open({str(tmp_path / 'executed')!r}, 'w').close()\n"
        f"class OwnConfig({base}Config):\n    model_type = 'own-kind'\n"
        f"class OwnModel({model}):\n    config_class = OwnConfig\n"
    )
    return out


def test_code_of_a_model_is_run_only_if_it_is_allowed(
    with_code: Path, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(str(tmp_path / "hf"))
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat")
    command = ["eval", str(with_code), "--val-data", str(text), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "--trust-remote-code" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "executed").exists()
    assert cli.main([*command, "--trust-remote-code"]) == 0
    assert (tmp_path / "executed").exists()


def test_code_is_allowed_for_transformers_models_only(checkpoint: Path, tmp_path: Path, capsys):
    assert cli.main(["eval", str(checkpoint), "--trust-remote-code", "--out", str(tmp_path)]) == 2
    assert "not a transformers model" in capsys.readouterr().err
