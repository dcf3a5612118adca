"""Fine-tuning in transformers (Trainer, LoRA), and weights kept elsewhere by accelerate."""

from __future__ import annotations

import re

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import parcae
from conftest import KINDS, randomised, tiny
from hub_models import (  # noqa: F401
    TRANSFORMER,
    in_transformers,
    modelling_file,
    ours,
    random_tokens,
    theirs,
)
from parcae.data.tokenizer import Tokenizer
from parcae.hub import modeling_parcae
from parcae.hub.loops import drawn_depths
from parcae.hub.modeling_parcae import ParcaeForCausalLM, ParcaeLayer
from parcae.hub.remote_code import remote_code
from parcae.model.store import save


class Repeated(Dataset):
    """Rows that repeat two tokens: a few steps are enough to learn something of them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.tensor([3 + index % 7, 20 + index % 5] * 6)
        return {"input_ids": row, "labels": row}


ARGUMENTS = {
    "max_steps": 12,
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 0,
}


def train(model, folder) -> list[float]:
    """The losses of the steps; the trained model is saved in `folder`."""
    from transformers import Trainer, TrainingArguments  # a second, for slow tests only

    arguments = TrainingArguments(output_dir=str(folder), **ARGUMENTS)
    trainer = Trainer(model=model, args=arguments, train_dataset=Repeated())
    trainer.train()
    trainer.save_model()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
def test_trainer(tmp_path, ours, monkeypatch):
    """Every sequence has a depth of its own; the loss falls; the saved model is the trained one."""
    drawn = []

    def drawing(rows, config):
        drawn.append(drawn_depths(rows, config))
        return drawn[-1]

    monkeypatch.setattr(modeling_parcae, "drawn_depths", drawing)
    model = in_transformers(ours)
    losses = train(model, tmp_path / "run")
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0]
    assert [len(depths) for depths in drawn] == [8] * 12
    assert sum(len(set(depths.loops)) > 1 for depths in drawn) >= 10
    assert {path.name for path in (tmp_path / "run").iterdir()} >= remote_code().keys()
    loaded = ParcaeForCausalLM.from_pretrained(tmp_path / "run")
    tokens = random_tokens(2, 8)
    expected = model.eval()(tokens).logits
    assert torch.equal(loaded(tokens).logits, expected)
    here = parcae.load(tmp_path / "run")(tokens, loops=4, state="zero").logits
    torch.testing.assert_close(here, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_lora(tmp_path, ours):
    """Only the adapters learn; saved and loaded they give the same logits."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = in_transformers(ours)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    before = {name: p.clone() for name, p in base.named_parameters() if not p.requires_grad}
    losses = train(model, tmp_path / "run")
    assert sum(losses[-3:]) / 3 < losses[0]
    after = dict(base.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    loaded = PeftModel.from_pretrained(in_transformers(ours), tmp_path / "run")
    tokens = random_tokens(2, 8)
    expected = model.eval()(tokens).logits
    torch.testing.assert_close(loaded.eval()(tokens).logits, expected)
    assert (expected - in_transformers(ours)(tokens).logits).abs().max() > 1e-3
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = ParcaeForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(loaded(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    here = parcae.load(tmp_path / "merged")(tokens, loops=4, state="zero").logits
    torch.testing.assert_close(here, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("source", [modeling_parcae, modelling_file()], ids=["package", "folder"])
def test_evaluation_while_training(tmp_path, ours, source):
    """At the depth of the configuration, by `eval_strategy`, `evaluate` and `predict`."""
    from transformers import Trainer, TrainingArguments

    model, rows = in_transformers(ours, source), Repeated()
    tokens = torch.stack([rows[index]["input_ids"] for index in range(len(rows))])
    expected = ours(tokens, loops=4, state="zero").logits
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    arguments = TrainingArguments(output_dir=str(tmp_path), **ARGUMENTS | evaluation)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)
    predicted = torch.tensor(trainer.predict(rows).predictions)
    torch.testing.assert_close(predicted, expected, atol=1e-4, rtol=1e-4)
    trainer.train()
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [1]


PARTS = ("embed_tokens", "value_embeddings", "prelude", "core", "readout", "coda", "norm")


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [None, "everything", "what does not fit", *PARTS])
def test_weights_on_the_disk(theirs, tmp_path, on_disk):
    """Loaded from there for every use, they give the same; as often as they are asked for."""
    theirs.save_pretrained(tmp_path / "model")
    options = {"device_map": "auto"}
    if on_disk == "everything":
        options["device_map"] = {"": "disk"}
    elif on_disk == "what does not fit":
        options["max_memory"] = {"cpu": 100_000}
    elif on_disk is not None:
        options["device_map"] = {f"model.{part}": "cpu" for part in PARTS} | {
            "lm_head": "disk" if on_disk == "embed_tokens" else "cpu",  # one weight
            f"model.{on_disk}": "disk",
        }
    model = ParcaeForCausalLM.from_pretrained(
        tmp_path / "model", offload_folder=tmp_path / "disk", **options
    )
    assert any(p.is_meta for p in model.parameters()) == (on_disk is not None)
    check_same(model, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_offloading_with_accelerate(kind, tmp_path, place):
    """Of a model in memory, whose weights wait on the CPU or on the disk."""
    from accelerate import cpu_offload, disk_offload

    ours = randomised(KINDS[kind])
    model = in_transformers(ours)
    if place == "cpu":
        cpu_offload(model, execution_device="cpu")
    else:
        disk_offload(model, tmp_path, execution_device="cpu")
    assert all(p.is_meta for p in model.parameters())
    check_same(model, in_transformers(ours))


def check_same(model, expected) -> None:
    tokens, greedy = random_tokens(2, 7), {"do_sample": False, "max_new_tokens": 4}
    for _ in range(2):
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert torch.equal(model.generate(tokens, **greedy), expected.generate(tokens, **greedy))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parcae", "rdm"])
def test_layers_on_several_devices(kind):
    """The core's layers too: operands of an operation are on one device. These tensors have no
    values, and so may be on devices that this machine does not have."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = in_transformers(randomised(KINDS[kind]))
    with FakeTensorMode(), torch.inference_mode():
        for name, module in list(model.named_modules()):
            on_second = re.search(r"core\.layers\.1|coda|readout|model\.norm|lm_head", name)
            device = "cpu:1" if on_second else "cpu"
            for key, parameter in list(module.named_parameters(recurse=False)):
                value = torch.empty(parameter.shape, device=device)
                setattr(module, key, nn.Parameter(value, requires_grad=False))
            if isinstance(module, ParcaeLayer | nn.Linear | nn.RMSNorm):
                add_hook_to_module(module, AlignDevicesHook(device))
        tokens = torch.zeros(3, 7, dtype=torch.long)
        for loops in (3, [1, 3, 2]):
            logits = model(tokens, num_loops=loops, use_cache=False).logits
            assert str(logits.device) == "cpu:1"


LINES = ["the cat sat on a mat", "one dog ran"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    save(randomised(tiny(vocab_size=320)), folder)
    Tokenizer.train(LINES * 30, size=300).save(folder / "tokenizer.json")
    return parcae.export(folder, folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("added", [None, "<|im_end|>"])
@pytest.mark.parametrize("library", ["transformers", "trl"])
def test_fine_tuning_teaches_where_a_text_ends(exported, tmp_path, library, added):
    """By the end that the model was trained with, or by a token that is added for it."""
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    if added is not None:
        tokenizer.add_special_tokens({"eos_token": added})
        model.resize_token_embeddings(len(tokenizer))
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    end = tokenizer.eos_token
    arguments = ARGUMENTS | {"max_steps": 25, "learning_rate": 1e-2, "output_dir": str(tmp_path)}
    if library == "trl":
        from datasets import Dataset as Table
        from trl import SFTConfig, SFTTrainer

        rows = Table.from_list([{"text": line} for line in LINES])
        config = SFTConfig(bf16=False, **arguments)
        trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    else:
        rows = [dict(tokenizer(line + end)) for line in LINES]
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = Trainer(model, TrainingArguments(**arguments), collator, rows)
    assert (next(iter(trainer.get_train_dataloader()))["labels"] == tokenizer.eos_token_id).any()
    trainer.train()
    trainer.save_model(str(tmp_path / "tuned"))
    tokenizer.save_pretrained(tmp_path / "tuned")
    ours, model = parcae.open_checkpoint(tmp_path / "tuned"), model.eval()
    engine = parcae.Engine(ours.model, ours.tokenizer)
    for line in LINES:
        start = line[:3]  # the first word, as it is in training
        prompt = tokenizer(start, return_tensors="pt")
        text = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0]
        assert tokenizer.decode(text) == f"<|bos|>{line}{end}"
        options = {"max_new_tokens": 30, "temperature": 0, "stop_tokens": (tokenizer.eos_token_id,)}
        assert engine.generate(start, **options).text == line[3:]


def test_special_tokens_of_an_exported_tokenizer(exported):
    """Templates and trainers write them; a text may be encoded without."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = parcae.open_checkpoint(exported).tokenizer.encode("a <|pad|> b")
    assert tokenizer.pad_token_id == 2 != tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    assert chat == [*tokenizer("a", add_special_tokens=False)["input_ids"], 0]
    assert tokenizer("a <|pad|> b", split_special_tokens=True)["input_ids"] == [0, *ids]
    assert 2 in tokenizer("a <|pad|> b")["input_ids"]


@pytest.mark.parametrize(("rows", "pad"), [(260, 257), (257, None)])
def test_padding_where_a_tokenizer_has_no_token_for_it(tmp_path, rows, pad):
    """One is added if the embedding has a row for it; BOS would not be learned as the end."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    save(randomised(tiny(vocab_size=rows)), tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    folder = parcae.export(tmp_path, tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.pad_token_id == model.config.pad_token_id == pad
    assert model.generation_config.pad_token_id == pad
    if pad is not None:
        batch = tokenizer(["a", "bcd"], padding=True, return_tensors="pt")
        assert batch["input_ids"][0, -1] == pad
        assert model(**batch).logits.isfinite().all()


def test_a_transformer_trains_too():
    model = in_transformers(randomised(TRANSFORMER)).train()
    tokens = random_tokens(2, 8)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
