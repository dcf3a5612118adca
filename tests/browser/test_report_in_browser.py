"""The report as a browser shows it: every picture is drawn and nothing overflows on a phone."""

from __future__ import annotations

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
  const broken = [...document.images].filter(i => !i.complete || i.naturalWidth === 0).length;
  const wide = document.documentElement.scrollWidth - innerWidth;
  const boxes = [...document.querySelectorAll("main > .tables .scroll")];
  const cut = boxes.filter(b => b.scrollWidth > b.clientWidth).length;
  const left = Math.min(...boxes.map(b => b.getBoundingClientRect().left));
  const right = Math.max(...boxes.map(b => b.getBoundingClientRect().right));
  const main = document.querySelector("main").clientWidth;
  const used = Math.round(100 * (right - left) / main);
  const samples = [...document.querySelectorAll(".sample")];
  const columns = new Set(samples.map(s => s.getBoundingClientRect().left)).size;
  const found = [document.images.length, broken, wide, cut, used, columns];
  document.title = found.join(" ");
})</script>
"""


def title_in_browser(page, width, tmp_path):
    """What a script in the page finds, as the title of the page it leaves."""
    command = [
        BROWSER,
        "--headless",
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
    return re.search(r"<title>(.*?)</title>", shown.stdout, re.DOTALL).group(1)


@pytest.mark.parametrize(("width", "abreast"), [(1280, 2), (500, 1)])
def test_every_picture_is_drawn_and_nothing_overflows(width, abreast, tmp_path):
    folder = fake_runs.looped_run(tmp_path / "run")
    page = write_report(folder, tmp_path / "report")
    html = page.read_text()
    assert "Content-Security-Policy" in html
    # The page itself forbids scripts; for the probe alone they are allowed.
    probed = re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", html).replace(
        "</body>", PROBE + "</body>"
    )
    copy = tmp_path / "probed.html"
    copy.write_text(probed)
    found = title_in_browser(copy, width, tmp_path)
    images, broken, overflow, cut, used, columns = map(int, re.findall(r"-?\d+", found))
    assert images >= 10
    assert broken == 0
    assert overflow <= 0
    assert cut == 0, "a table is not wholly seen"
    assert used > 90, "tables leave the page empty"
    assert columns == abreast
