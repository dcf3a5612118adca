"""The report as a browser shows it: every picture is drawn and nothing overflows on a phone."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest

import fake_runs
from parcae.report.page import write_report

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
PROBE = """
<script>addEventListener("load", () => {
  const seen = () => [...document.querySelectorAll("figure svg")].filter(
    svg => svg.getBoundingClientRect().height > 100);
  const color = element => getComputedStyle(element).fill;
  const text = seen()[0].querySelector("text");
  const scale = matrix => Math.hypot(matrix.a, matrix.b);
  const sizes = seen().map(svg => Math.min(...[...svg.querySelectorAll("text")].map(
    t => parseFloat(getComputedStyle(t).fontSize) * scale(t.getScreenCTM()))));
  const boxes = [...document.querySelectorAll("section > .tables .scroll")];
  const left = Math.min(...boxes.map(b => b.getBoundingClientRect().left));
  const right = Math.max(...boxes.map(b => b.getBoundingClientRect().right));
  const figures = {};
  for (const axis of ["step", "tokens", "flops"]) {
    document.getElementById("x-" + axis).checked = true;
    figures[axis] = [seen().length, seen()[0].textContent.includes("training " + axis)];
  }
  document.title = JSON.stringify({
    window: innerWidth,
    figures,
    text: color(text),
    paper: getComputedStyle(document.body).backgroundColor,
    smallest: Math.min(...sizes),
    overflow: document.documentElement.scrollWidth - innerWidth,
    cut: boxes.filter(b => b.scrollWidth > b.clientWidth).length,
    used: (right - left) / document.querySelector("main").clientWidth,
    columns: new Set([...document.querySelectorAll(".sample")].map(
      s => s.getBoundingClientRect().left)).size,
  });
})</script>
"""


def title_in_browser(page, width, tmp_path, dark=False):
    """What a script in the page finds, as the title of the page it leaves."""
    command = [
        BROWSER,
        "--headless=new",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        "--virtual-time-budget=5000",
        "--dump-dom",
        page.as_uri(),
    ]
    environment = {**os.environ, "HOME": str(tmp_path)}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return html.unescape(re.search(r"<title>(.*?)</title>", shown.stdout, re.DOTALL).group(1))


def lightness(color: str) -> float:
    """From 0 for black to 1 for white, of `rgb(29, 36, 48)`."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 765


@pytest.mark.parametrize(("width", "abreast", "dark"), [(1280, 2, False), (390, 1, True)])
def test_every_picture_is_drawn_and_nothing_overflows(width, abreast, dark, tmp_path):
    folder = fake_runs.looped_run(tmp_path / "run")
    page = write_report(folder, tmp_path / "report")
    text = page.read_text()
    assert "Content-Security-Policy" in text
    # The page itself forbids scripts; for the probe alone they are allowed.
    probed = re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", text).replace(
        "</body>", PROBE + "</body>"
    )
    copy = tmp_path / "probed.html"
    copy.write_text(probed)
    found = json.loads(title_in_browser(copy, width, tmp_path, dark))
    assert found["window"] <= max(width, 500)
    assert found["figures"] == {"step": [13, False], "tokens": [13, True], "flops": [13, False]}
    assert found["overflow"] <= 0
    assert found["smallest"] > 8.5, "text in figures is too small to read"
    assert (lightness(found["paper"]) < 0.2) == dark
    assert abs(lightness(found["text"]) - lightness(found["paper"])) > 0.7
    assert found["cut"] == 0, "a table is not wholly seen"
    assert found["used"] > 0.9, "tables leave the page empty"
    assert found["columns"] == abreast
