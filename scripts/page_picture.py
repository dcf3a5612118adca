"""Draw docs/images/serve.png: the page of the server with a text of the demo model.

    PYTHONPATH=tests python scripts/page_picture.py out/demo/run

Starts `parcae serve`, generates a text with early exit in a headless Chromium, and inspects the
token that became the likeliest one in the latest loop. The text is the same every time; the speed
is that of the machine. `--dark`, `--compare` and `--width 390` show the page in other ways.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from chromium import Browser, Page

PROMPT = "class Reader:\n    def __init__(self"
FIELDS = {"#prompt": PROMPT, "#seed": 5, "#max-tokens": 88, "#rule": "kl", ".exit": 2}
CHOOSE = """(async () => {
  let chosen = 1, best = 0;
  for (const [index, token] of first.tokens.entries()) {
    if (token.text.trim().length < 3) continue;
    const body = {prompt: first.idsBefore(index), num_loops: first.used.loops, top: TOP};
    token.trace = await (await api("v1/trace", body)).json();
    const used = token.trace.loops.slice(0, token.loops), winners = used.map(loop => loop.top[0]);
    const turn = winners.findLastIndex(winner => winner.id !== token.id) + 1;  // since this loop
    const score = turn && turn < used.length ? turn + winners.at(-1).probability : 0;
    if (score > best) [chosen, best] = [index, score];
  }
  globalThis.chosen = first.tokens[chosen].span;
})()"""
MARGIN = 40
"""Of the empty space below the page."""
BOTTOM = "Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)"


def fill(page: Page, selector: str, value: object) -> None:
    page.evaluate(
        f"for (const e of document.querySelectorAll({json.dumps(selector)})) {{"
        f" e.value = {json.dumps(str(value))};"
        " e.dispatchEvent(new Event('input', {bubbles: true}));"
        " e.dispatchEvent(new Event('change', {bubbles: true})); }"
    )


def draw(url: str, path: Path, *, width: int, dark: bool, compare: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        page = browser.open(url, width=width, height=1000, dark=dark)
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        page.wait("$('status').textContent === 'Connected.'")
        if compare:
            page.click("#compare")
        for selector, value in FIELDS.items():
            fill(page, selector, value)
        page.click("#generate")
        page.wait("/^Finished/.test($('status').textContent)")
        page.evaluate(CHOOSE)
        page.wait("globalThis.chosen !== undefined")
        if width >= 1000:
            page.evaluate("chosen.focus({preventScroll: true})")
            page.wait("document.querySelector('#predictions td')")
            page.resize(width, page.evaluate(BOTTOM) - MARGIN)
        else:
            page.evaluate("chosen.focus()")
            page.wait("document.querySelector('#predictions td')")
        page.screenshot(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--out", type=Path, default=Path("docs/images/serve.png"))
    parser.add_argument("--width", type=int, default=1240)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--compare", action="store_true", help="two depths side by side")
    arguments = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "parcae",
        "serve",
        f"demo={arguments.checkpoint}",
        "--port",
        "0",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[2]
        options = {"width": arguments.width, "dark": arguments.dark, "compare": arguments.compare}
        draw(url, arguments.out, **options)
    finally:
        server.terminate()
        server.wait(60)
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
