"""The device that a name means, and the commands that take one."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor

import parcae
from oracles import text_model, tokenizer
from parcae.cli import main
from parcae.config import ConfigError
from parcae.device import TRAINING_DEVICES, check_compiler, find_device, multiplies_bfloat16
from parcae.training.distributed import training_device


def test_auto_is_the_cpu_without_another_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    assert training_device("auto") == torch.device("cpu")
    for name in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=rf"^device: no {name} device .* Use auto or cpu\."):
            find_device(name)
        with pytest.raises(ConfigError, match=r"^run\.device: "):
            training_device(name)


def test_training_prefers_mps_to_the_cpu_and_inference_does_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    asked = []
    empty = torch.empty

    def record(size: int, device: object) -> torch.Tensor:
        asked.append(device)
        return empty(size, device="meta")

    monkeypatch.setattr(torch, "empty", record)
    find_device("auto"), find_device("auto", auto=TRAINING_DEVICES)
    assert asked == ["cpu", "mps"]


@pytest.mark.parametrize(
    ("limit", "capability", "instructions", "expected"),
    [
        (None, "AVX512", True, True),
        ("AVX512_CORE_AMX", "AVX512", True, True),
        ("avx512_core_bf16", "AVX512", True, True),
        ("AVX512_CORE", "AVX512", True, False),
        (None, "AVX2", True, False),
        (None, "AVX512", False, False),
    ],
)
def test_products_of_bfloat16_need_instructions_that_may_be_used(
    limit, capability, instructions, expected, monkeypatch
):
    """As with ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": instructions})
    assert multiplies_bfloat16() == expected


def test_new_models_are_created_on_a_device_that_exists(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert parcae.create("parcae-1m", width=32, vocab_size=300, device="auto").device.type == "cpu"
    for name in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=rf"^device: no {name} device .* Use auto or cpu\."):
            parcae.create("parcae-1m", device=name)


def test_models_are_opened_on_a_device(tmp_path):
    parcae.save(parcae.create("parcae-1m", width=32, vocab_size=300), tmp_path)
    assert parcae.load(tmp_path, device="auto").device == find_device("auto")
    assert parcae.load(tmp_path, device="meta").device.type == "meta"
    with pytest.raises(ConfigError, match="device: nowhere cannot be used"):
        parcae.load(tmp_path, device="nowhere")


def test_what_cannot_be_compiled_is_refused_before_it_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "/nowhere/g++"))
    out = tmp_path / "run"
    assert main(["train", "demo", "--out", str(out), "--run.compile", "true"]) == 2
    assert "run.compile: torch.compile found no C++ compiler" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"^compile: torch\.compile found no"):
        parcae.Engine(text_model(), backend="static", compile=True)
    check_compiler(torch.device("cuda"), "compile")  # compiled by Triton


@pytest.mark.parametrize("command", ["generate", "depth", "eval", "serve"])
def test_commands_refuse_a_device_that_is_not_there(tmp_path, capsys, command):
    parcae.save(text_model(), tmp_path)
    tokenizer().save(tmp_path / "tokenizer.json")
    text = {"generate": ["a"], "depth": ["a"]}.get(command, [])
    assert main([command, str(tmp_path), *text, "--device", "cuda:77"]) == 2
    assert "device: cuda:77 cannot be used here" in capsys.readouterr().err
