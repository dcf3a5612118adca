"""Losses at every depth against the model's own loss and a count by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from conftest import KINDS, randomised, tiny
from parcae.config import ConfigError, LoopConfig
from parcae.evaluation.loss import Totals, totals_by_loops

TRANSFORMER = tiny(
    architecture="transformer",
    injection="none",
    readout=False,
    prelude_norm=False,
    loop=LoopConfig(mean_loops=1),
)
VOCAB = 96
BYTES = torch.randint(0, 7, (VOCAB,), generator=torch.Generator().manual_seed(2))


def batches(count: int = 3, rows: int = 2, length: int = 9, ignored: bool = False):
    generator = torch.Generator().manual_seed(count)
    made = []
    for i in range(count):
        tokens = torch.randint(VOCAB, (rows + i, length), generator=generator)
        targets = torch.randint(VOCAB, (rows + i, length), generator=generator)
        if ignored:
            targets[:, i : i + 2] = -100
        made.append((tokens, targets))
    return made


@pytest.mark.parametrize("kind", [*KINDS, "transformer"])
def test_equals_the_loss_of_the_model(kind):
    model = randomised(KINDS.get(kind, TRANSFORMER))
    looped = kind != "transformer"
    loops = (1, 3, 5) if looped else (1,)
    (tokens, targets), *_ = given = batches(1)
    measured = totals_by_loops(model, given, loops).finish()
    assert list(measured) == sorted(loops)
    for depth, one in measured.items():
        options = {"state": "zero"} if looped else {}
        expected = model(tokens, targets, loops=depth, **options).loss.item()
        assert one.loss == pytest.approx(expected, rel=1e-5)
        assert one.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
        assert one.bits_per_byte is None


def test_bits_per_byte_by_hand_over_uneven_batches_with_ignored_targets():
    model = randomised(KINDS["parcae"])
    given = batches(3, ignored=True)
    nats = text_nats = tokens_seen = bytes_seen = 0.0
    for tokens, targets in given:
        logits = model(tokens, loops=4, state="zero").logits.detach()
        for row in range(len(tokens)):
            for place in range(tokens.shape[1]):
                target = int(targets[row, place])
                if target == -100:
                    continue
                loss = -float(F.log_softmax(logits[row, place].double(), -1)[target])
                nats += loss
                text_nats += loss if BYTES[target] > 0 else 0.0
                tokens_seen += 1
                bytes_seen += int(BYTES[target])
    measured = totals_by_loops(model, given, [4], BYTES).finish()[4]
    assert measured.loss == pytest.approx(nats / tokens_seen, rel=1e-5)
    bits = text_nats / math.log(2) / bytes_seen
    assert measured.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_special_targets_count_in_the_loss_and_not_in_bits_per_byte():
    """Rows that contain BOS have the bits per byte of the same predictions without BOS."""
    model = randomised(KINDS["parcae"])
    (tokens, targets), *_ = batches(1)
    targets = targets.clone()
    targets[:, ::3] = 0
    table = BYTES.clamp(min=1)
    table[0] = 0
    text_only = targets.masked_fill(targets == 0, -100)
    whole = totals_by_loops(model, [(tokens, targets)], (1, 3), table).finish()
    text = totals_by_loops(model, [(tokens, text_only)], (1, 3), table).finish()
    for depth in (1, 3):
        expected = text[depth].bits_per_byte
        assert whole[depth].bits_per_byte == pytest.approx(expected, rel=1e-5)
        assert whole[depth].loss != pytest.approx(text[depth].loss, rel=1e-3)


def test_totals_of_several_processes_add_up():
    model = randomised(KINDS["parcae"])
    given = batches(3)
    whole = totals_by_loops(model, given, (2, 1), BYTES)
    parts = [totals_by_loops(model, [one], (1, 2), BYTES) for one in given]
    nothing = totals_by_loops(model, [], (1, 2), BYTES)
    added = parts[0] + parts[1] + parts[2] + nothing
    torch.testing.assert_close(added.counts, whole.counts)
    assert added.counts.dtype == torch.float64
    assert added.tokens == sum(targets.numel() for _, targets in given)
    again = Totals(whole.loops, whole.counts.clone())
    assert again.finish() == totals_by_loops(model, given, (1, 2), BYTES).finish()


def test_totals_at_different_loops_do_not_add():
    model = randomised(KINDS["parcae"])
    with pytest.raises(ValueError, match="cannot add totals"):
        totals_by_loops(model, [], (1,)) + totals_by_loops(model, [], (2,))


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_gradients_are_unchanged(training):
    model = randomised(KINDS["parcae"]).train(training)
    totals_by_loops(model, batches(1), (1, 2)).finish()
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_without_targets_does_not_count():
    model = randomised(KINDS["parcae"])
    given = batches(2)
    empty = (given[0][0], torch.full_like(given[0][1], -100))
    assert (
        totals_by_loops(model, [*given, empty], (2,)).finish()
        == totals_by_loops(model, given, (2,)).finish()
    )


def test_a_broken_model_is_not_hidden():
    model = randomised(KINDS["parcae"])
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    measured = totals_by_loops(model, batches(1), (1,)).finish()[1]
    assert math.isnan(measured.loss)
    assert math.isnan(measured.perplexity)


def test_mistakes():
    model = randomised(KINDS["parcae"])
    with pytest.raises(ConfigError, match="at least one batch"):
        totals_by_loops(model, [], (1,)).finish()
    with pytest.raises(ConfigError, match="loops"):
        totals_by_loops(model, batches(1), ()).finish()
    with pytest.raises(ValueError, match="at least one"):
        totals_by_loops(model, batches(1), (0,)).finish()
    with pytest.raises(ValueError, match="Give the table of the tokenizer"):
        totals_by_loops(model, batches(1), (1,), BYTES[:5]).finish()
    with pytest.raises(ValueError, match="no loop"):
        totals_by_loops(randomised(TRANSFORMER), batches(1), (1, 2)).finish()


def test_no_bytes_at_all_is_not_a_number_of_bits():
    model = randomised(KINDS["parcae"])
    assert totals_by_loops(model, batches(1), (1,), BYTES * 0).finish()[1].bits_per_byte is None
