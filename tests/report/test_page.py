"""The page: complete, escaped, self-contained, whatever the run has or lacks."""

from __future__ import annotations

import base64
import html
import json
import random
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest

import fake_runs as fakes
import parcae
from chromium import BROWSER, Browser
from parcae.cli import main
from parcae.experiments.paper_runs import paper_table
from parcae.presets import PRESETS
from parcae.recipe import flatten
from parcae.report.figures import block_names
from parcae.report.panel import panel

VOID = {"meta", "link", "img", "br", "input"}


class Reader(HTMLParser):
    """Checks that tags close in order; collects images, links and what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str]] = []
        self.pictures: list[dict[str, str]] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attributes = dict(attrs)
        self.references += [attributes[k] for k in ("src", "href", "srcset") if k in attributes]
        if tag == "img":
            self.pictures.append(attributes)
        if attributes.get("role") == "img":
            self.images.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):  # of SVG
        self.tags.add(tag)
        attributes = dict(attrs)
        self.references += [attributes[k] for k in ("src", "href") if k in attributes]

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


pytestmark = pytest.mark.slow  # for all of them a report is drawn


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = fakes.looped_run(tmp_path_factory.mktemp("one") / "demo")
    return folder, *report(folder)


@pytest.mark.slow
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


@pytest.mark.slow
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
    allowed = re.compile(r"data:|#")  # symbols of a figure are defined within it
    assert all(allowed.match(reference) for reference in reader.references)
    assert not re.search(r"https?://|url\([^#]|@import", content)
    assert "default-src 'none'" in content
    assert len(content) < 3_000_000


def test_figures_have_words_and_files(one):
    folder, content, reader = one
    assert len(list((folder / "report").glob("*.png"))) == 13
    over_training = content.count('<div class="x-step">')
    assert over_training == content.count('<div class="x-flops">') == 9
    assert len(reader.images) == 13 + 2 * over_training
    labels = [image["aria-label"] for image in reader.images]
    assert all(len(label) > 20 for label in labels)
    assert any("from" in label and "Loss over training" in label for label in labels)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (folder / "report").glob("*.png"))
    assert "[model.loop]\nmean_loops = 8" in reader.text


def test_figures_are_over_steps_tokens_or_flops(one):
    """By radio buttons in the page; 60 steps are 492k tokens and 7.2e11 FLOPs."""
    _, content, _ = one
    buttons = re.findall(r"<input[^>]*>", content)
    assert [re.search(r'id="x-(\w+)"', button)[1] for button in buttons] == [
        "step",
        "tokens",
        "flops",
    ]
    assert [" checked>" in button for button in buttons] == [True, False, False]
    loss = content.split("<figure>")[1]
    ticks = {
        axis: re.findall(r"<text[^>]*>([^<]+)</text>", part.split("matplotlib.axis_2")[0])
        for axis, part in re.findall(r'<div class="x-(\w+)">(.*?)</div>', loss, re.DOTALL)
    }
    assert {"0", "20", "40", "60"} <= set(ticks["step"])
    assert {"150k", "300k", "training tokens"} <= set(ticks["tokens"])
    assert {"2e11", "4e11", "training FLOPs"} <= set(ticks["flops"])


def test_figures_have_the_colours_of_the_page(one):
    """Every colour is a variable of the style sheet, which is another one in the dark."""
    _, content, _ = one
    figures = "".join(re.findall(r"<figure>.*?</figure>", content, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b(?!\))", re.sub(r'"#[^"]*"|url\(#[^)]*\)', "", figures))
    used = set(re.findall(r"var\((--\w+)\)", figures))
    assert {"--c0", "--line"} <= used
    light, dark = content.split("@media (prefers-color-scheme: dark)")[:2]
    for name in used:
        assert f"{name}: #" in light
        assert f"{name}: #" in dark


def test_the_table_is_written_as_markdown_csv_and_latex(one):
    folder, _, _ = one
    comparison = parcae.compare(folder)
    for name, format in {"md": "markdown", "csv": "csv", "tex": "latex"}.items():
        assert (folder / f"report/runs.{name}").read_text() == comparison.format(format)


def test_captions_hold_at_any_width(one):
    _, content, _ = one
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", content)
    assert len(captions) == 13
    assert not any(re.search(r"\b(left|right)\b", caption) for caption in captions)


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
    assert re.findall(r'scope="col">([^<]*)<', section) == ["Run", "optimiser.lr"]
    assert re.findall(r"</svg>([^<]*)</th><td>([^<]*)<", section) == [
        ("a/demo", "0.008"),
        ("b/demo", "0.004"),
    ]
    summary = content.split("<h2>Summary</h2>")[1].split("</table>")[0]
    assert summary.count('scope="row"') == 2, "runs are rows"
    assert "a/demo" in reader.text
    assert "b/demo" in reader.text

    recipe = third / "recipe.toml"
    recipe.write_text(
        recipe.read_text() + '[start]\ncheckpoint = "<a>"\nsha256 = "0123456789abcdef"\n'
    )
    content, reader = report(first, second, third, out=tmp_path / "three")
    assert "<a> (sha256 0123456789ab)" in reader.text
    assert "3 runs compared" in reader.text
    assert "Transformer, 3 layers" in reader.text
    assert "model.architecture" in content.split("Differences between")[1]
    assert any("baseline" in image["aria-label"] for image in reader.images)


@pytest.mark.slow
def test_norms_of_several_runs_are_grouped_by_matrix(tmp_path):
    folders = [fakes.looped_run(tmp_path / f"run {i}", seed=i) for i in range(4)]
    _, reader = report(*folders, out=tmp_path / "out")
    labels = {image["aria-label"] for image in reader.images}
    norms = [label for label in labels if "Spectral norms" in label]
    assert len(norms) == 4
    assert all(label.count(": from ") <= 4 for label in norms), "a line for each run"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_nothing_scrolls_sideways_at_1300_pixels(tmp_path):
    folders = [fakes.looped_run(tmp_path / f"parcae-wide-{i}", seed=i) for i in range(4)]
    report(*folders, out=tmp_path / "out")
    with Browser(tmp_path) as browser:
        page = browser.open((tmp_path / "out" / "report.html").as_uri(), width=1300)
        wide = (
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
        )
        assert page.evaluate(f"{wide}.length") == 0


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
    outcome = fakes.result(90, status="diverged", validation={}, train_loss=None, samples=[])
    outcome["diagnosis"] = "the norm grew at core 1 <& there>"
    folder = fakes.write_run(tmp_path / "$_{x}$", [*looks, check, *lines], outcome=outcome)
    content, reader = report(folder)
    assert "nan" not in reader.text
    assert "the norm grew at core 1 &lt;&amp; there&gt;" in content
    report(folder, fakes.looped_run(tmp_path / "_hidden"), out=tmp_path / "both")


@pytest.mark.slow
def test_a_record_of_another_hand(tmp_path):
    """Keys that are equal as numbers, text that is not Unicode, huge steps, and endless lists."""
    noise = random.Random(0)
    lines = [fakes.train_line(step, 9, noise) for step in range(1, 10)]
    lines[3]["lr"] = dict.fromkeys(map(str, range(2000)), 1e-3)
    losses = {"1": 3.0, "01": {"loss": 2.0}, "9" * 5000: 1.0, "²": 1.0}
    losses |= {str(depth): 3.0 for depth in range(2, 2000)}
    lines.append({"kind": "validation", "step": 5, "losses": losses})
    lists = ("state_norms", "residuals", "prelude_norms", "first_loop_norms")
    measured = {name: [1.0] * 300_000 for name in lists}
    lines += [{**fakes.telemetry_line(step, 9, noise), **measured} for step in (1, 9)]
    event = {"kind": "event", "what": "spike", "message": "half \ud800 a pair \u202e"}
    lines += [{**event, "step": step} for step in (10**400, None, "x", *range(3000))]
    start = time.process_time()
    content, _ = report(fakes.write_run(tmp_path / "run", lines))
    assert time.process_time() - start < 60
    assert "half \\ud800 a pair" in content


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


def limits(y, *, faint=None, **options) -> tuple[float, float]:
    with panel("title", "y") as (_, drawn):
        x = np.arange(len(y), dtype=float)
        drawn.line(x, np.array(y, dtype=float))
        if faint is not None:
            drawn.line(x, np.array(faint, dtype=float), faint=True)
        drawn.limit(**options)
        return drawn.axes.get_ylim()


def test_losses_before_a_divergence_stay_visible():
    low, high = limits([8.0, *[5, 3, 3, 3] * 20, 1e5, 1e6], cut_start=True)
    assert 2 < low < 3
    assert 5 < high < 12


def test_the_start_of_training_does_not_flatten_the_rest():
    fall = 3 + 5 * np.exp(-np.arange(400) / 4)
    low, high = limits(fall, smallest_range=0.03, cut_start=True)
    assert 2.9 < low < 3
    assert high < 3.2
    assert limits(fall)[1] > 8


def test_noise_does_not_fill_a_panel():
    noise = np.random.default_rng(0).normal(size=300)
    low, high = limits(3.3 + 1e-4 * noise, smallest_range=0.03)
    assert high - low == pytest.approx(0.1, rel=0.1)
    low, high = limits(np.full(5, 0.0))
    assert low <= 0 < high
    low, high = limits(np.full(5, 1e-9))
    assert low >= 0
    low, high = limits(5000 + noise, faint=5000 + 50 * noise + 1e6 * (noise > 2.9))
    assert high < 6000, "a single spike of a noisy curve"


def test_blocks_are_named_after_the_model():
    config = PRESETS["parcae-1m"]
    inside = ["injection", "core 1"]
    assert block_names(config, 2, 2) == ["prelude 1", "prelude norm", *inside]
    assert block_names(config, 3, 2) == ["embedding", "prelude 1", "prelude norm", *inside]
    plain = PRESETS["rdm-350m"]
    assert block_names(plain, 3, 0) == ["embedding", "prelude 1", "prelude 2"]
    assert block_names(None, 2, 2) == ["prelude 1", "prelude 2", *inside]
    assert block_names(config, 0, 0) == []


SCRIPT = "<script>alert(1)</script>|$x_1$&"


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_names_settings_and_events_are_escaped(tmp_path):
    """In the page, in its figures and in the tables beside it."""
    runs = []
    for name in (SCRIPT.replace("/", ""), "other"):
        lines = [fakes.train_line(s, 9, random.Random(0)) for s in range(1, 10)]
        lines.append({"kind": "event", "step": 2, "what": SCRIPT, "message": SCRIPT})
        tree = fakes.recipe(run={"seed": 0, "note": f"{SCRIPT} {name}"})
        outcome = fakes.result(9, device=SCRIPT)
        outcome["samples"] = [{"depth": SCRIPT, "prompt": SCRIPT, "text": SCRIPT}]
        runs.append(fakes.write_run(tmp_path / name, lines, tree, outcome))
    content, reader = report(*runs, out=tmp_path / "out")
    assert "script" not in reader.tags
    assert reader.text.count(SCRIPT) >= 8
    assert "<script" not in content
    markdown = (tmp_path / "out/runs.md").read_text()
    assert "&lt;script>alert(1)&lt;script>\\|\\$x_1\\$&amp;" in markdown
    assert len({line.count(" | ") for line in markdown.splitlines() if "---" not in line}) == 1


@pytest.mark.slow
def test_a_sweep_is_reported_with_its_table_and_fit(tmp_path, monkeypatch):
    from parcae.sweeps.folder import SweepFolder

    sweep = tmp_path / "grid"
    names = [f"run-{index}" for index in range(10)]
    for index, name in enumerate(names[:9]):
        fakes.looped_run(sweep / "runs" / name, steps=12, seed=index)
    (sweep / "sweep.json").write_text("{}")
    (sweep / "runs.csv").write_text("model\n")
    monkeypatch.setattr(SweepFolder, "run_names", lambda self: names)
    table = paper_table(("140m",))
    parcae.fit(table, starts=20, unified_starts=20, bootstrap_samples=0).save(sweep / "fit")
    refresh = "<svg xmlns='x'><meta http-equiv='refresh' content='0;url=https://a.b'/></svg>"
    (sweep / "fit/hostile.svg").write_text(refresh)
    (sweep / "fit/broken.svg").write_bytes(b"\xff\x00 no picture")
    (tmp_path / "secret").write_text("secret")
    (sweep / "fit/linked.svg").symlink_to(tmp_path / "secret")
    path = parcae.write_report(sweep)
    assert path == sweep / "report/report.html"
    assert "http-equiv='refresh'" not in path.read_text()
    assert "form-action 'none'" in path.read_text()
    assert base64.b64encode(b"secret").decode() not in path.read_text()
    reader = Reader()
    reader.feed(path.read_text())
    assert "<h1>grid: 9 runs</h1>" in path.read_text()
    assert "1 run of 10 not started yet" in reader.text
    assert {"../runs.csv", "../fit/laws.html"} <= set(reader.references)
    assert "E + X N(μ)^-x + Y D^-y: X" in reader.text
    pictures = {image["alt"]: image["src"] for image in reader.pictures}
    assert {"isoflop", "isoloss", "hostile", "broken"} <= pictures.keys()
    assert "linked" not in pictures
    data = "data:image/svg+xml;base64,"
    assert all(source.startswith(data) for source in pictures.values())
    assert base64.b64decode(pictures["hostile"].removeprefix(data)).decode() == refresh
