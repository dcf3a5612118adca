"""The page of the laws in a browser: its answers and curves are those of the library."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from test_report_in_browser import BROWSER, lightness, title_in_browser

from parcae.experiments.paper_runs import paper_table
from parcae.laws.fit import fit
from parcae.laws.page import page_data, write_page
from parcae.laws.predict import loss_at, recommend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]
PROBE = """
<script>addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const dots = document.querySelectorAll("circle").length;
  const shown = [];
  for (const position of [$("flops").value, 3, 70]) {
    $("flops").value = position;
    show();
    const at = (id, index) => ["x", "line", "low", "high"].map(name => drawn[id][name][index]);
    shown.push({answer: $("answer").textContent, loops: [at("by-loops", 5), at("by-loops", 20)],
      test: [at("by-test", 0), at("by-test", 6)], mu: +$("loops-text").value});
  }
  const label = document.querySelector("svg text");
  const text = parseFloat(getComputedStyle(label).fontSize) * label.getScreenCTM().a;
  const paper = getComputedStyle(document.body).backgroundColor;
  document.title = JSON.stringify({wide, dots, shown, text, paper});
})</script>
"""


@pytest.fixture(scope="module")
def result():
    return fit(paper_table(("370m",)), starts=60, unified_starts=60, bootstrap_samples=40)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_draws_runs_and_answers_like_predict(tmp_path, width, dark, result):
    page = write_page(result, tmp_path / "laws.html")
    page.write_text(page.read_text().replace("</main>", f"</main>{PROBE}"))
    probed = json.loads(title_in_browser(page, width, tmp_path, dark))
    assert probed["wide"] <= 0
    assert probed["text"] == pytest.approx(12, abs=0.1), "text keeps its size at every width"
    assert (lightness(probed["paper"]) < 0.2) == dark
    assert probed["dots"] >= 7 + 10
    model = result.models["parcae-370m"]
    positions = page_data(model)["flops"]
    for shown, index in zip(probed["shown"], (None, 3, 70), strict=True):
        text, loops, loss = re.search(
            r"For (\S+) FLOPs: ([\d.]+) .*?loss ([\d.]+)", shown["answer"]
        ).groups()
        flops = float(text) if index is None else positions[index]
        expected = recommend(model, flops)
        assert float(loops) == pytest.approx(expected.loops.value, abs=0.051)
        assert float(loss) == pytest.approx(expected.loss.value, abs=5.1e-5)
        for mu, *series in shown["loops"]:
            tokens = flops / float(model.cost.smooth_flops_per_token(mu))
            check(series, loss_at(model, mu, tokens).estimate)
        for test_loops, *series in shown["test"]:
            tokens = flops / float(model.cost.flops_per_token(shown["mu"]))
            check(series, loss_at(model, shown["mu"], tokens, test_loops).estimate)


def test_without_a_law_of_test_loops_nothing_of_it_is_shown(tmp_path, result):
    model = result.models["parcae-370m"]
    laws = {name: law for name, law in model.laws.items() if name == "training"}
    alone = replace(result, models={"mine": replace(model, laws=laws)})
    probe = """<script>addEventListener("load", () => {
      const shown = [...document.querySelectorAll("label, section, .of-test")];
      document.title = shown.filter(part => part.getClientRects().length).length; })</script>"""
    page = write_page(alone, tmp_path / "laws.html")
    page.write_text(page.read_text().replace("</main>", f"</main>{probe}"))
    assert title_in_browser(page, 800, tmp_path) == "3"  # model, FLOPs, and one chart


def check(series, estimate):
    """Curves are interpolated between budgets; intervals, being order statistics, less smoothly."""
    expected = np.array([estimate.value, estimate.low, estimate.high])
    assert (np.abs(np.array(series) - expected) <= [5e-5, 5e-4, 5e-4]).all(), (series, expected)
