"""What every loop does to every token, against forwards at each depth; and the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conftest import KINDS, randomised, tiny
from parcae.cli import main
from parcae.config import ConfigError, LoopConfig
from parcae.data.tokenizer import Tokenizer
from parcae.evaluation.loop_trace import LoopTrace, shown_depths, trace_loops
from parcae.infer.sampling import NonFiniteLogits
from parcae.model.store import save
from parcae.runs.checkpoints import write_state

TOKENS = [5, 17, 80, 80, 3, 60, 9]
TEXT = "price = $x_1$ [bold] 日\n\tend      of"
TOKENIZER = Tokenizer.train(["price = value\n\tend      of price\n" * 5], 300)
LABELS = (">price<", ">[<", ">$<", ">␣×5<", ">→end<", r">\xe6<")
"""Labels of tokens: neither formulas nor markup, and with visible white space."""


@pytest.fixture(scope="module")
def model():
    return randomised(tiny(vocab_size=TOKENIZER.vocab_size + 3))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(model, folder)
    TOKENIZER.save(folder / "tokenizer.json")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parcae", "parcae-wide-state", "rdm", "addition"])
def test_each_row_is_a_forward_at_that_depth(kind):
    model = randomised(KINDS[kind])
    trace = trace_loops(model, TOKENS, loops=6)
    row = torch.tensor([TOKENS])
    assert trace.targets.tolist() == TOKENS[1:]
    assert f"<td>{trace.loss[3, 0].item():.4g}</td>" in trace._repr_html_()
    assert trace.loss.shape == trace.change.shape == trace.predicted.shape == (6, 6)
    before = torch.zeros(())
    for loops in range(1, 7):
        seen = model(row[:, :-1], loops=loops, state="zero")
        loss = F.cross_entropy(seen.logits[0], row[0, 1:], reduction="none")
        torch.testing.assert_close(trace.loss[loops - 1], loss.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(trace.predicted[loops - 1], seen.logits[0].argmax(-1))
        state = seen.state[0].detach()
        change = (state - before).norm(dim=-1) / state.norm(dim=-1)
        torch.testing.assert_close(trace.change[loops - 1], change, rtol=1e-3, atol=1e-6)
        before = state
    assert torch.equal(trace.change[0], torch.ones(6))


@pytest.mark.slow
def test_loops_default_to_the_mean_in_training(model):
    assert trace_loops(model, TOKENS).loops == 4


def test_settled_is_when_the_prediction_no_longer_changes():
    predicted = torch.tensor([[1, 1, 1, 4], [1, 2, 3, 3], [1, 1, 3, 4], [1, 1, 3, 5]])
    nothing = torch.zeros(4, 4)
    trace = LoopTrace(torch.zeros(4), nothing, nothing, predicted)
    assert trace.settled.tolist() == [1, 3, 2, 4]


@pytest.mark.parametrize(
    ("losses", "conclusion"),
    [
        ([3.0], "One loop: a mean loss of 3.00 nats."),
        ([3.0, 2.2, 2.05, 2.0], "4 loops lower the mean loss from 3.00 to 2.00 nats, 3 do nine"),
        ([2.0, 2.5], "2 loops raise the mean loss from 2.00 to 2.50 nats; 1 of 2 predictions are"),
        ([2.0, 1.5, 2.001], "The mean loss is 2.00 nats after 1 and 3 loops; 1 of 2 predictions"),
    ],
)
def test_the_conclusion_says_what_the_loops_did(losses, conclusion):
    loss = torch.tensor(losses)[:, None].expand(-1, 2)
    predicted = torch.tensor([[1, 1]] * (len(losses) - 1) + [[1, 2]])
    assert LoopTrace(torch.zeros(2), loss, loss, predicted).conclusion.startswith(conclusion)


def test_what_cannot_be_traced_is_refused(model):
    with pytest.raises(ConfigError, match="the first one is not predicted"):
        trace_loops(model, [5])
    with pytest.raises(ConfigError, match="must be at least 1"):
        trace_loops(model, TOKENS, loops=0)
    plain = tiny(
        architecture="transformer",
        injection="none",
        readout=False,
        prelude_norm=False,
        loop=LoopConfig(mean_loops=1),
    )
    with pytest.raises(ConfigError, match="has no loop"):
        trace_loops(randomised(plain), TOKENS)


def test_a_model_without_predictions_is_named():
    broken = randomised(tiny())
    with torch.no_grad():
        broken.embed.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteLogits):
        trace_loops(broken, TOKENS)


@pytest.mark.slow
def test_the_command_prints_what_was_measured(capsys, folder, model, tmp_path):
    picture = tmp_path / "deep" / "map.svg"
    arguments = ["depth", str(folder), "--loops", "5", "--out", str(picture), TEXT]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    ids = TOKENIZER.encode(TEXT)
    trace = trace_loops(model, [TOKENIZER.bos, *ids], loops=5)
    assert [one["token"] for one in told["tokens"]] == ids
    assert "".join(one["text"] for one in told["tokens"]).startswith("price = $x_1$")
    torch.testing.assert_close(torch.tensor(told["mean_loss"]), trace.loss.mean(1))
    for place, one in enumerate(told["tokens"]):
        torch.testing.assert_close(torch.tensor(one["loss"]), trace.loss[:, place])
        torch.testing.assert_close(torch.tensor(one["change"]), trace.change[:, place])
        assert one["predicted"] == trace.predicted[:, place].tolist()
        assert one["settled"] == trace.settled[place]
    drawn = picture.read_text()
    for text in ("Loss of each token", "Relative change of the state", *LABELS):
        assert text in drawn


@pytest.mark.slow
def test_the_table_has_a_row_for_each_token_and_a_mean(capsys, folder, model, tmp_path):
    picture = tmp_path / "map.png"
    assert main(["depth", str(folder), TEXT, "--out", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ids = TOKENIZER.encode(TEXT)
    trace = trace_loops(model, [TOKENIZER.bos, *ids])
    rows = [line.split() for line in lines if line.startswith("  '")]
    assert len(rows) == len(ids)
    mean = next(line for line in lines if line.startswith("  mean")).split()
    change = f"{(trace.loss[-1] - trace.loss[0]).mean():+.2f}"
    assert mean[1:5] == [change, *(f"{trace.loss[t - 1].mean():.2f}" for t in (1, 2, 4))]
    assert lines[0] == trace.conclusion
    assert any("'['" in line or "' ['" in line for line in lines)  # no markup in a token
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert lines[-1] == f"wrote {picture}"


@pytest.mark.slow
def test_the_figure_is_written_into_the_run(capsys, folder, tmp_path, monkeypatch):
    """For a model that is not part of a run, into out/."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "runs/mine/checkpoints/step-00000001")
    write_state(Path("runs/mine/checkpoints/step-00000001"), 1, {})
    for source, place in {
        "runs/mine": "runs/mine/depth.png",
        "runs/mine/checkpoints/step-00000001": "runs/mine/depth.png",
        str(tmp_path / "runs" / "mine"): str(tmp_path / "runs" / "mine" / "depth.png"),
        str(folder): "out/depth.png",
    }.items():
        assert main(["depth", source, "price"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"wrote {place}"
        Path(place).unlink()
    monkeypatch.chdir("runs/mine/checkpoints")
    assert main(["depth", "step-00000001", "price"]) == 0
    assert (tmp_path / "runs" / "mine" / "depth.png").exists()
    assert not (folder / "depth.png").exists()


@pytest.mark.slow
def test_a_long_text_is_cut_with_a_note(capsys, folder, tmp_path):
    arguments = ["depth", str(folder), "price " * 50, "--json", "--out", str(tmp_path / "map.svg")]
    whole = len(TOKENIZER.encode("price " * 50))
    for more, kept in ((["--tokens", "7"], 7), ([], 32)):  # the context holds 32
        assert main([*arguments, *more]) == 0
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)["tokens"]) == kept
        assert f"Used the first {kept} of {whole} tokens" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--loops", "3"], "text: it is empty"),
        (["price", "--loops", "0"], "--loops: 0 is out of range"),
        (["price", "--loops", "1000000000"], "--loops: 1000000000 is out of range. Use 1 to 256."),
        (["price", "--tokens", "0"], "--tokens: 0 is out of range"),
        (["price", "--out", "map.txt"], "Use .png, .svg or .pdf"),
        (["@nowhere.txt"], "no such file"),
    ],
)
def test_mistakes(capsys, folder, arguments, message):
    assert main(["depth", str(folder), *arguments]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert message in stderr


def test_shown_depths():
    assert shown_depths(1) == [1]
    assert shown_depths(8) == [1, 2, 4, 8]
    assert shown_depths(11) == [1, 2, 4, 8, 11]
