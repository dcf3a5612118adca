"""Fine-tuning in transformers: Trainer and LoRA."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

import parcae
from conftest import randomised
from hub_models import TRANSFORMER, in_transformers, ours, random_tokens  # noqa: F401
from parcae.hub import modeling_parcae
from parcae.hub.loops import drawn_depths
from parcae.hub.modeling_parcae import ParcaeForCausalLM
from parcae.hub.remote_code import remote_code


class Repeated(Dataset):
    """Rows that repeat two tokens: a few steps are enough to learn something of them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.tensor([3 + index % 7, 20 + index % 5] * 6)
        return {"input_ids": row, "labels": row}


def train(model, folder) -> list[float]:
    """The losses of the steps; the trained model is saved in `folder`."""
    from transformers import Trainer, TrainingArguments  # a second, for slow tests only

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
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


def test_device_map(tmp_path, ours):
    theirs = in_transformers(ours)
    theirs.save_pretrained(tmp_path)
    placed = ParcaeForCausalLM.from_pretrained(tmp_path, device_map="auto")
    tokens = random_tokens(1, 4)
    assert torch.equal(placed(tokens).logits, theirs(tokens).logits)


def test_a_transformer_trains_too():
    model = in_transformers(randomised(TRANSFORMER)).train()
    tokens = random_tokens(2, 8)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
