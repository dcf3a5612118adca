"""The page of the laws as a browser shows it: its own arithmetic gives Python's answer."""

from __future__ import annotations

import re

import pytest
from test_report_in_browser import BROWSER, title_in_browser

from parcae.experiments.paper_runs import paper_table
from parcae.laws.analysis import fit
from parcae.laws.page import write_page
from parcae.laws.predict import recommend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
PROBE = """
<script>addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const dots = document.querySelectorAll("circle").length;
  const answer = document.getElementById("answer").textContent;
  document.title = `overflow ${wide} dots ${dots} | ${answer}`;
})</script>
"""


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_draws_runs_and_answers_like_predict(tmp_path, width):
    result = fit(paper_table(("370m",)), starts=60, unified_starts=60, bootstrap_samples=40)
    page = write_page(result, tmp_path / "laws.html")
    page.write_text(page.read_text().replace("</main>", f"</main>{PROBE}"))
    said = title_in_browser(page, width, tmp_path)
    overflow, dots = map(int, re.match(r"overflow (-?\d+) dots (\d+)", said).groups())
    assert overflow <= 0
    assert dots >= 7 + 10
    flops, loops, loss = (
        float(n) for n in re.search(r"For (\S+) FLOPs: ([\d.]+) .*?loss ([\d.]+)", said).groups()
    )
    fitted = result.models["parcae-370m"]
    laws = {"training": fitted.laws["unified"]}  # the page uses the unified law's floor
    from dataclasses import replace

    expected = recommend(replace(fitted, laws=laws), flops)
    assert loops == pytest.approx(expected.loops.value, rel=0.03)
    assert loss == pytest.approx(expected.loss.value, abs=1e-3)
