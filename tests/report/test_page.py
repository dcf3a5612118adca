"""The page: complete, escaped, self-contained, whatever the run has or lacks."""

from __future__ import annotations

import html
import json
import random
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import fake_runs as fakes
import parcae
from parcae.cli import main
from parcae.presets import PRESETS
from parcae.report.figures import block_names
from parcae.report.html import flatten
from parcae.report.panel import panel

VOID = {"meta", "link", "img", "br"}


class Reader(HTMLParser):
    """Checks that tags close in order; collects images, links and what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str]] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attributes = dict(attrs)
        self.references += [attributes[k] for k in ("src", "href", "srcset") if k in attributes]
        if tag == "img":
            self.images.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.seen.append(data)

    @property
    def text(self) -> str:
        return "".join(self.seen)


def report(*folders, out=None) -> tuple[str, Reader]:
    path = parcae.write_report(folders, out or folders[0] / "report")
    content = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(content)
    assert reader.open == []
    return content, reader


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = fakes.looped_run(tmp_path_factory.mktemp("one") / "demo")
    return folder, *report(folder)


def test_every_number_of_the_result_is_shown(one):
    folder, content, reader = one
    outcome = json.loads((folder / "result.json").read_text())
    samples = outcome.pop("samples")
    for key, value in flatten(outcome).items():
        assert f">{html.escape(key)}</th><td>" in content
        assert str("–" if value is None else value) in reader.text, key
    for sample in samples:
        assert sample["text"] in reader.text
    for shown in ("942,848", "492k", "7.2e11", "6.6e11", "38 s", "2.9753", "2.9491", "19.09"):
        assert shown in reader.text, shown
    assert "validation loss 2.949 at T = 8, 3.516 at T = 1" in reader.text


def test_a_run_is_called_by_where_it_stands(one):
    """`run` alone, as the demo's is called, would say nothing."""
    folder, content, _ = one
    assert f"<h1>{folder.parent.name}/{folder.name}</h1>" in content
    assert f"<title>{folder.parent.name}/{folder.name} – Parcae report</title>" in content


def test_nothing_of_a_run_becomes_markup(one):
    _, content, reader = one
    assert "script" not in reader.tags
    assert "<b>&lt;script&gt;alert(&#x27;T&#x27;)&lt;/script&gt; &amp; </b>" in content
    assert "&lt;b&gt;bold&lt;/b&gt;" in content
    assert "the gradient was &lt;not&gt; finite" in content


def test_needs_no_other_file(one):
    _, content, reader = one
    assert all(reference.startswith("data:") for reference in reader.references)
    assert not re.search(r"https?://|url\(|@import", content)
    assert "default-src 'none'" in content
    assert len(content) < 3_000_000


def test_figures_have_words_and_files(one):
    folder, _, reader = one
    assert len(reader.images) == 13
    assert all(len(image["alt"]) > 20 for image in reader.images)
    assert len(list((folder / "report").glob("*.png"))) == 13
    assert any("from" in i["alt"] and "Loss over training" in i["alt"] for i in reader.images)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (folder / "report").glob("*.png"))
    assert "[model.loop]\nmean_loops = 8" in reader.text


@pytest.mark.slow
def test_samples_of_two_runs_stand_side_by_side(tmp_path):
    folders = [fakes.looped_run(tmp_path / name) for name in ("a", "b")]
    content, _ = report(*folders, out=tmp_path / "two")
    labels = re.findall(r'<span class="soft">(\w), T = (\d+)</span>', content)
    assert labels == [("a", "1"), ("b", "1"), ("a", "8"), ("b", "8")] * 2  # of two prompts


@pytest.mark.slow
def test_several_runs_are_compared(tmp_path):
    first = fakes.looped_run(tmp_path / "a/demo")
    second = fakes.looped_run(tmp_path / "b/demo", seed=1, optimiser={"lr": 0.004})
    third = fakes.transformer_run(tmp_path / "baseline")
    content, reader = report(first, second, out=tmp_path / "two")
    section = content.split("Differences between the recipes")[1].split("</section>")[0]
    assert re.findall(r'scope="row">([^<]*)<', section) == ["optimiser.lr"]
    assert re.findall(r"<td>([^<]*)<", section) == ["0.008", "0.004"]
    assert "a/demo" in reader.text
    assert "b/demo" in reader.text

    content, reader = report(first, second, third, out=tmp_path / "three")
    assert "3 runs compared" in reader.text
    assert "Transformer, 3 layers" in reader.text
    assert "model.architecture" in content.split("Differences between")[1]
    assert any("baseline" in image["alt"] for image in reader.images)


@pytest.mark.slow
def test_a_transformer_has_no_loop_to_show(tmp_path):
    _, reader = report(fakes.transformer_run(tmp_path / "run"))
    assert "Inside the loop" not in reader.text
    assert "Samples" not in reader.text
    assert "3.5157" in reader.text


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_single_step_and_nothing_else(tmp_path):
    line = fakes.train_line(1, 1, random.Random(0))
    _, reader = report(fakes.write_run(tmp_path / "run", [line], tail='{"kind":"tra'))
    assert "not validated" in reader.text
    assert "no result yet" in reader.text
    assert "Spikes" in reader.text
    for absent in ("Samples", "Events", "Inside the loop", "What differs"):
        assert absent not in reader.text


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_only_events(tmp_path):
    event = {"kind": "event", "step": 0, "what": "resumed", "message": "from <step> 0"}
    _, reader = report(fakes.write_run(tmp_path / "run", [event]))
    assert "from <step> 0" in reader.text
    assert reader.images == []


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite(tmp_path):
    noise = random.Random(0)
    lines = [fakes.train_line(s, 90, noise) for s in range(1, 91)]
    for line in lines[30:50]:
        line |= {"loss": 1e9, "gradient_norm": 1e280, "mean_depth": float("nan")}
    for line in lines[50:]:
        line |= {"loss": float("inf"), "gradient_norm": None, "lr": None}
    looks = [fakes.telemetry_line(s, 90, noise) for s in (30, 60)]
    looks[1] |= {"state_norms": [1, 1e9, None, float("inf")], "spectral_radius": None}
    looks[1] |= {"readout_norm": None, "residuals": None, "prelude_norms": "broken"}
    check = {"kind": "validation", "step": 60, "losses": {"1": None, "8": float("nan")}}
    outcome = fakes.result(90, status="diverged", validation=None, train_loss=None, samples=None)
    outcome["diagnosis"] = "the norm grew at core 1 <& there>"
    folder = fakes.write_run(tmp_path / "$_{x}$", [*looks, check, *lines], outcome=outcome)
    content, reader = report(folder)
    assert "nan" not in reader.text
    assert "the norm grew at core 1 &lt;&amp; there&gt;" in content
    report(folder, fakes.looped_run(tmp_path / "_hidden"), out=tmp_path / "both")


@pytest.mark.slow
def test_many_runs_and_many_steps_stay_small(tmp_path):
    folders = [fakes.looped_run(tmp_path / f"run {i}", steps=300, seed=i) for i in range(10)]
    content, _ = report(*folders, out=tmp_path / "out")
    assert len(content) < 3_000_000


@pytest.mark.slow
def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fakes.transformer_run(tmp_path / "a")
    fakes.transformer_run(tmp_path / "b")
    assert main(["report", "a"]) == 0
    assert "a/report/report.html" in capsys.readouterr().out
    assert (tmp_path / "a/report/report.html").is_file()
    assert main(["report", "a", "b"]) == 0
    assert (tmp_path / "out/report/report.html").is_file()
    assert main(["report", "a", "b", "--out", "here"]) == 0
    assert (tmp_path / "here/loss.png").is_file()
    assert main(["report", "nowhere"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "nowhere: no such folder" in message


def test_losses_before_a_divergence_stay_visible():
    with panel("title", "y") as (_, drawn):
        y = np.array([8.0, 5, 3, 1e5, 1e6])
        drawn.line(np.arange(5.0), y)
        drawn.cut_above(12)
        low, high = drawn.axes.get_ylim()
    assert high == 12
    assert 2 < low < 3


def test_blocks_are_named_after_the_model():
    config = PRESETS["parcae-1m"]
    inside = ["injection", "core 1"]
    assert block_names(config, 2, 2) == ["prelude 1", "prelude norm", *inside]
    assert block_names(config, 3, 2) == ["embedding", "prelude 1", "prelude norm", *inside]
    plain = PRESETS["rdm-350m"]
    assert block_names(plain, 3, 0) == ["embedding", "prelude 1", "prelude 2"]
    assert block_names(None, 2, 2) == ["prelude 1", "prelude 2", *inside]
    assert block_names(config, 0, 0) == []
