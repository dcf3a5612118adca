"""The page in a browser, against the real server: what it shows is what the engine computes."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import tokenizers
import torch
import uvicorn

from chromium import BROWSER, Browser
from conftest import randomised, tiny
from parcae.data.tokenizer import Tokenizer
from parcae.infer.engine import Engine
from parcae.runs import Checkpoint
from parcae.serving.app import close, create_app, end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
MARKUP = [f"<img/src=x/onerror=document.title={n}>" for n in range(20)]
MARKUP += [f"<script>document.title={n}</script>" for n in range(20)]
SEED = 4
"""With it texts of the model are long."""
DONE = "/^(Finished|Stopped|Ended|Nothing)/.test($('status').textContent)"
CONNECTED = "$('status').textContent === 'Connected.'"
SIDES = """[...document.querySelectorAll(".side:not([hidden])")].map(side => {
  const tokens = [...side.querySelectorAll(".token")];
  return {
    text: side.querySelector(".tokens").textContent,
    loops: tokens.map(token => +token.ariaLabel.match(/, (\\d+) loop/)[1]),
    tints: tokens.map(token => getComputedStyle(token).backgroundColor),
    bars: side.querySelector(".histogram").ariaLabel,
    speed: side.querySelector(".speed").textContent,
    differs: tokens.findIndex(token => token.matches(".differs")),
  };
})"""


class RunningServer:
    """The server in a thread, on a port that a restart keeps."""

    def __init__(self, checkpoint: Checkpoint, **options) -> None:
        self.checkpoint, self.options, self.port = checkpoint, options, 0
        self.start()

    def start(self) -> None:
        self.app = create_app(named={"tiny": self.checkpoint}, **self.options)
        config = uvicorn.Config(self.app, port=self.port, log_config=None)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            self.thread.join(0.02)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"

    def stop(self, at_once: bool = False) -> None:
        """`at_once`: without waiting for the texts that are being written."""
        if at_once:
            self.server.config.timeout_graceful_shutdown = 0
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        close(self.app)

    @contextmanager
    def slowed(self, seconds=0.02):
        """Give tests time to act while a text is being written."""
        engine = self.app.state.models["tiny"].engine
        step = engine.step

        def slow_step():
            time.sleep(seconds)
            return step()

        engine.step = slow_step
        yield
        engine.step = step


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    backend = tokenizers.Tokenizer.from_str(Tokenizer.train(["import os, sys\n"] * 9, 270).content)
    backend.add_tokens(MARKUP)
    tokenizer = Tokenizer(backend.to_str())
    model = randomised(tiny(vocab_size=tokenizer.vocab_size, context_length=512), seed=6).eval()
    return Checkpoint(model, tokenizer, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def complete(checkpoint):
    """What the engine writes with the settings of the page."""
    engine = Engine(checkpoint.model, checkpoint.tokenizer)
    ends = [checkpoint.tokenizer.token_bytes.index(name) for name in (b"<|bos|>", b"<|eos|>")]
    settings = {"stop_tokens": ends, "loops": 4, "temperature": 0.8, "seed": SEED}
    return partial(engine.generate, exit="kl:0.002", **settings)


@pytest.fixture(scope="module")
def server(checkpoint):
    running = RunningServer(checkpoint)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def open_page(browser, server):
    pages = []

    def open_page(url=server.url, **options):
        pages.append(browser.open(url, **options))
        pages[-1].wait(CONNECTED)
        return pages[-1]

    yield open_page
    for page in pages:
        problems = [text for text in page.problems if "Failed to load resource" not in text]
        assert problems == [], "errors in scripts, or of the content security policy"


def write(page, selector, text):
    page.click(selector)
    page.evaluate("document.activeElement.select()")
    page.write(str(text))


def move(page, slider, steps):
    page.evaluate(f"document.querySelector({json.dumps(slider)}).focus()")
    for _ in range(abs(steps)):
        page.press("ArrowRight" if steps > 0 else "ArrowLeft")


def no_exit(page):
    page.evaluate(
        "for (const slider of document.querySelectorAll('.exit')) {"
        " slider.value = 0; slider.dispatchEvent(new Event('input', {bubbles: true})); }"
    )


def generate(page):
    page.click("#generate")
    page.wait(DONE)
    return page.evaluate(SIDES)


def test_types_moves_sliders_and_shows_the_loops_of_each_token(open_page, complete):
    page = open_page()
    prompt = "import os\n<b>"
    write(page, "#prompt", prompt)
    write(page, "#seed", SEED)
    write(page, "#max-tokens", 40)
    move(page, "#temperature", 4)
    move(page, ".loops", 4)
    assert page.text(".exit-value") == "< 0.002"
    page.evaluate("$('rule').value = 'state', $('rule').dispatchEvent(new Event('change'))")
    move(page, ".exit", 4)
    assert page.text(".loops-value") == "8"
    assert page.text(".exit-value") == "< 5\u00a0%"
    page.evaluate("$('prompt').focus()")
    page.press("Enter", ctrl=True)
    page.wait(DONE)
    [side] = page.evaluate(SIDES)
    expected = complete(prompt, loops=8, exit="state:0.05", max_new_tokens=40, temperature=1.0)
    assert side["text"] == expected.text
    assert side["loops"] == list(expected.loops)
    assert page.text(".given") == prompt
    counts = sorted(Counter(expected.loops).items())
    assert side["bars"].endswith(". " + ", ".join(f"{loops}: {n}" for loops, n in counts))
    assert len(counts) >= 3, "the model's tokens should differ in depth"
    empty = page.evaluate(
        "[...first.histogramElement.querySelectorAll('i')].map(bar => bar.matches('.none'))"
    )
    assert empty == [loops not in expected.loops for loops in range(1, 9)], "no tokens, no bar"
    assert len(set(zip(side["loops"], side["tints"], strict=True))) == len(set(side["tints"]))
    assert len(set(side["tints"])) == len(counts)
    assert float(side["speed"].replace(",", "")) > 0
    mean = sum(expected.loops) / len(expected.loops)
    assert page.text("#status").startswith("Finished: 40 tokens, ")
    assert page.text("#status").endswith(f", {mean:.1f} loops on average.")


def test_a_full_context_is_named(open_page):
    page = open_page()
    length = page.evaluate("models[0].parcae.context_length")
    write(page, "#prompt", "a" * (length - 4))  # nearly full already
    write(page, "#max-tokens", length)
    write(page, "#seed", SEED)
    generate(page)
    assert page.text("#status").endswith(" The model's context is full.")


def test_two_depths_are_written_at_the_same_time(open_page, complete, server):
    page = open_page(width=1440)
    page.click("#compare")
    assert page.text(".side:nth-child(2) .loops-value") == "1"
    no_exit(page)
    write(page, "#seed", SEED)
    write(page, "#max-tokens", 30)
    page.evaluate(
        "globalThis.order = []; document.querySelectorAll('.tokens').forEach((tokens, side) =>"
        " new MutationObserver(() => order.push(side)).observe(tokens, {childList: true}))"
    )
    with server.slowed():
        deep, shallow = generate(page)
    order = page.evaluate("order.join('')")
    assert "0" in order.rstrip("0")[order.index("1") :], f"one after the other: {order}"
    texts = [complete("import ", exit=None, loops=t, max_new_tokens=30) for t in (4, 1)]
    assert [deep["text"], shallow["text"]] == [text.text for text in texts]
    assert set(deep["loops"]) == {4}
    assert set(shallow["loops"]) == {1}
    pairs = zip(*(text.tokens for text in texts), strict=True)
    first = next(index for index, (a, b) in enumerate(pairs) if a != b)
    assert deep["differs"] == shallow["differs"] == first
    ending = f"the first {first} token" if first else "from the first token on"
    assert ending in page.text("#status")


def test_a_token_shows_what_each_loop_predicted(open_page, complete, checkpoint):
    page = open_page()
    write(page, "#seed", SEED)
    write(page, "#max-tokens", 24)
    move(page, ".exit", 3)
    assert page.text(".exit-value") == "< 0.02"
    generate(page)
    text = complete("import ", exit="kl:0.02", max_new_tokens=24)
    page.point(".token:nth-child(6)")
    page.wait("document.querySelector('#predictions td')")
    assert page.text("#facts").startswith(f"Number 6 · id {text.tokens[5]} · ")
    check_inspector(page, checkpoint, text, 5)

    # By keyboard: one stop for all tokens, arrows between them, Escape closes.
    page.evaluate("document.querySelector('.exit').focus()")
    page.press("Tab")
    assert page.evaluate("document.activeElement.dataset.index") == "0"
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "ArrowRight"):
        page.press(key)
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    wait_for_inspector(page, 2)
    check_inspector(page, checkpoint, text, 1)
    assert page.evaluate("document.querySelectorAll('[aria-selected=true]').length") == 1
    page.press("Escape")
    assert page.evaluate("$('inspector').hidden && document.activeElement.dataset.index === '1'")
    assert page.evaluate("document.querySelectorAll('[aria-selected=true]').length") == 0


def test_labels_of_charts_stay_beside_their_lines_and_ticks_are_exact(open_page):
    page = open_page()
    labels = "labels = [{at: 101}, {at: 10}, {at: 100}]"
    spread = page.evaluate(f"(({labels}) => (spread(labels, 104), labels.map(x => x.at)))()")
    assert spread == [10, 92, 104]
    ticks = page.evaluate("CEILINGS.flatMap(x => [x, x / 2]).map(x => [x, parseFloat(percent(x))])")
    assert len(ticks) > 10
    for value, written in ticks:
        assert written == pytest.approx(100 * value)


def wait_for_inspector(page, number):
    page.wait(f"$('facts').textContent.startsWith('Number {number} ')")
    page.wait("!/^Comp/.test($('finding').textContent)")


def check_inspector(page, checkpoint, text, index):
    """Against a forward pass of the model for every number of loops."""
    tokenizer = checkpoint.tokenizer
    ids = [tokenizer.bos, *tokenizer.encode("import "), *text.tokens[:index]]
    rows = page.evaluate(
        "[...document.querySelectorAll('#predictions tbody tr')].map(row => ({"
        "after: row.className, cells: [...row.querySelectorAll('td')].map(cell => ({"
        "text: cell.title, percent: parseFloat(cell.querySelector('span').textContent),"
        "chosen: cell.matches('.chosen')}))}))"
    )
    assert len(rows) == 4
    for loops, row in enumerate(rows, start=1):
        with torch.no_grad():
            logits = checkpoint.model(torch.tensor([ids]), loops=loops, state="zero").logits[0, -1]
        values, tokens = logits.double().softmax(-1).topk(3)
        for cell, value, token in zip(row["cells"], values, tokens.tolist(), strict=True):
            name = tokenizer.token_bytes[token].decode(errors="replace")
            assert cell["text"] == name
            assert abs(cell["percent"] - 100 * float(value)) <= 0.51
            assert cell["chosen"] == (token == text.tokens[index])
        used = text.loops[index]
        assert row["after"] == ("after" if loops > used else "exit" if loops == used < 4 else "")
    assert page.evaluate("document.querySelectorAll('#charts svg circle').length") >= 8


def test_markup_written_by_the_model_is_text(open_page, complete):
    page = open_page()
    write(page, "#prompt", MARKUP[0])
    write(page, "#seed", SEED)
    [side] = generate(page)
    text = complete(MARKUP[0], max_new_tokens=96).text
    assert side["text"] == text
    assert text.count("<img/") > 2
    assert text.count("<script>") > 2
    for index in range(1, 30, 4):
        page.evaluate(f"document.querySelectorAll('.token')[{index}].focus()")
        wait_for_inspector(page, index + 1)
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("document.title") == "parcae"


def test_stops_and_keeps_the_text_when_a_request_is_refused(open_page, server):
    page = open_page()
    write(page, "#seed", SEED)
    write(page, "#max-tokens", 480)
    with server.slowed():
        page.click("#generate")
        page.wait("document.querySelectorAll('.token').length > 5")
        page.click("#stop")
        page.wait(DONE)
    assert page.text("#status").startswith("Stopped: ")
    [stopped] = page.evaluate(SIDES)
    assert 5 < len(stopped["loops"]) < 480
    write(page, "#max-tokens", 5000)
    assert generate(page) == [stopped], "a request that is refused loses nothing"
    assert page.text("#status") == "Nothing was generated."
    assert page.evaluate("!$('alert').hidden")
    assert "max_tokens" in page.text("#alert")
    assert page.text("#alert").count("\n") == 0


@pytest.mark.parametrize("says_so", [False, True])
def test_continues_when_the_server_is_back(open_page, checkpoint, complete, says_so):
    """`says_so`: the text ends with an error, as after --drain-seconds, and is not cut off."""
    server = RunningServer(checkpoint)
    try:
        page = open_page(server.url)
        write(page, "#seed", SEED)
        no_exit(page)  # after a break, tokens are read with all loops
        write(page, "#max-tokens", 100)
        with server.slowed(0.1):  # 10 s
            page.click("#generate")
            page.wait("document.querySelectorAll('.token').length > 5")
            if says_so:
                end(server.app)
                page.wait("$('status').dataset.state === 'lost'")
            server.stop(at_once=True)
        page.wait("$('status').dataset.state === 'lost'")
        assert page.text("#status").startswith("No connection to the server. What is written is")
        kept = page.evaluate(SIDES)[0]["text"]
        expected = complete("import ", exit=None, max_new_tokens=100)
        assert len(kept) < len(expected.text)
        assert expected.text.startswith(kept)
        server.start()
        page.wait(DONE)
        # Not the text: a character may have been cut in two.
        assert page.evaluate("first.tokens.map(token => token.id)") == list(expected.tokens)
        assert page.evaluate("$('alert').hidden")
    finally:
        server.stop()


def test_asks_for_the_api_key(open_page, browser, checkpoint):
    server = RunningServer(checkpoint, api_keys=["right"])
    try:
        page = browser.open(server.url)
        for key in ("wrong", "right"):
            page.wait("$('key-dialog').open && document.activeElement === $('key')")
            assert page.text("#status") != "Connected."
            page.write(key)
            page.press("Enter")
            page.wait(f"sessionStorage.getItem('key') === '{key}'")
        page.wait(CONNECTED)
        write(page, "#seed", SEED)
        write(page, "#max-tokens", 5)
        [side] = generate(page)
        assert len(side["loops"]) == 5
        assert page.evaluate("localStorage.length === 0 && document.cookie === ''")
    finally:
        server.stop()


CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const linear = x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const luminance = (...colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map(x => linear(x / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  const token = document.querySelector(".token");
  const tints = [0, 0.25, 0.5, 0.75, 1].map(depth => {
    token.style.setProperty("--depth", depth);
    return luminance(paper, getComputedStyle(token).backgroundColor);
  });
  const ink = luminance(paper, getComputedStyle(token).color);
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const styles = [0, 1, 2, 3, 4, 5, 6, 7].map(loop => {
    token.style.setProperty("--depth", loop / 7);
    return getComputedStyle(token).backgroundColor;
  });
  const lowest = Math.min(...tints.map(tint => contrast(tint, ink)));
  return {paper: luminance(paper), tints, lowest, styles};
})()"""


def closest(styles):
    """The smallest distance of neighbouring colours, in OKLab."""
    points = []
    for style in styles:
        light, chroma, hue = (float(x) for x in re.findall(r"[-\d.]+", style)[:3])
        angle = math.radians(hue)
        points.append((light, chroma * math.cos(angle), chroma * math.sin(angle)))
    return min(math.dist(a, b) for a, b in itertools.pairwise(points))


@pytest.mark.parametrize(("width", "dark"), [(375, True), (375, False), (1280, True)])
def test_fits_a_phone_and_is_readable_in_the_dark(open_page, width, dark):
    page = open_page(width=width, dark=dark, height=740)
    page.click("#compare")
    write(page, "#seed", SEED)  # others may end the text before the ninth token
    write(page, "#max-tokens", 30)
    generate(page)
    page.click(".token:nth-child(9)")
    page.wait("document.querySelector('#predictions td')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = "document.querySelector('.token:nth-child(9)').getBoundingClientRect()"
    if width == 375:
        # The inspector is a sheet at the bottom, and the token is visible above it.
        sheet = page.evaluate("$('inspector').getBoundingClientRect().top")
        assert 200 < sheet < 500
        assert 0 <= page.evaluate(f"{box}.top") <= page.evaluate(f"{box}.bottom") <= sheet
        page.evaluate("$('inspector').scrollTop = 999")
        top = page.evaluate("$('close').getBoundingClientRect().top")
        assert sheet <= top < sheet + 30, "the way out stays in reach"
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, input, textarea')]"
        ".filter(e => e.checkVisibility() && !e.matches('[type=checkbox]'))"
        ".filter(e => e.getBoundingClientRect().height < 24).map(e => e.id)"
    )
    assert small == [], "too small to tap"
    colours = page.evaluate(CONTRAST)
    assert (colours["paper"] < 0.1) == dark
    assert colours["lowest"] >= 4.5, "WCAG AA for text"
    if dark:
        assert closest(colours["styles"]) > 0.045, "neighbours among eight are told apart"
    assert colours["tints"] == sorted(colours["tints"], reverse=not dark), "an order by lightness"


@pytest.mark.parametrize("residuals", [[1], [1.5, 1], [0], [2, 0.3, 1e-12]])
def test_the_chart_of_residuals_has_a_range_for_any_residuals(open_page, residuals):
    page = open_page()
    top = [{"id": 1, "text": "a", "probability": 0.5}]
    loops = [{"residual": residual, "top": top} for residual in residuals]
    token = {"id": 1, "text": "a", "loops": len(loops), "trace": {"loops": loops}}
    page.evaluate(f"drawTrace({json.dumps(token)}, null)")
    heights = page.evaluate(
        "[...document.querySelectorAll('#charts circle')].map(point => +point.getAttribute('cy'))"
    )
    assert len(heights) == 2 * len(residuals)
    assert all(0 < height < 122 for height in heights)
    assert "NaN" not in page.evaluate("$('charts').innerHTML")


def test_every_control_has_a_name(open_page):
    page = open_page()
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "textbox", "spinbutton", "checkbox", "combobox")
    controls = [node for node in nodes if node["role"]["value"] in roles]
    assert len(controls) >= 8
    unnamed = [node for node in controls if not node["name"]["value"].strip()]
    assert unnamed == []
