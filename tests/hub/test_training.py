"""Fine-tuning in transformers: Trainer, LoRA, streaming."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from conftest import randomised
from hub_models import in_transformers, ours, random_tokens, theirs  # noqa: F401
from parcae.hub.modeling_parcae import ParcaeForCausalLM


class Repeated(Dataset):
    """Rows that repeat two tokens: a few steps are enough to learn something of them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.tensor([3 + index % 7, 20 + index % 5] * 6)
        return {"input_ids": row, "labels": row}


def train(model, folder) -> list[float]:
    from transformers import Trainer, TrainingArguments

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
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
def test_trainer(tmp_path, ours):
    """Per-sequence depths are drawn; the loss falls; saved and loaded it is the same model."""
    model = in_transformers(ours)
    losses = train(model, tmp_path / "run")
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0]
    model.save_pretrained(tmp_path / "tuned")
    loaded = ParcaeForCausalLM.from_pretrained(tmp_path / "tuned")
    tokens = random_tokens(2, 8)
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


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
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(in_transformers(ours), tmp_path / "adapter")
    tokens = random_tokens(2, 8)
    expected = model.eval()(tokens).logits
    torch.testing.assert_close(loaded.eval()(tokens).logits, expected)
    assert (expected - in_transformers(ours)(tokens).logits).abs().max() > 1e-3


def test_device_map(tmp_path, ours):
    theirs = in_transformers(ours)
    theirs.save_pretrained(tmp_path)
    placed = ParcaeForCausalLM.from_pretrained(tmp_path, device_map="auto")
    tokens = random_tokens(1, 4)
    assert torch.equal(placed(tokens).logits, theirs(tokens).logits)


def test_a_transformer_trains_too(tmp_path):
    from hub_models import TRANSFORMER

    model = in_transformers(randomised(TRANSFORMER)).train()
    tokens = random_tokens(2, 8)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
