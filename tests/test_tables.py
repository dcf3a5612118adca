"""Tables as text: what another reader of the format gets back is what was in the rows."""

from __future__ import annotations

import csv
import html
import io
import math
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt  # which rich depends on

import parcae
from parcae.tables import (
    csv_text,
    escape_markdown,
    format_table,
    html_curve,
    html_table,
    markdown_table,
)

ROWS = [
    {"run": "a|b <script>", "loss": 3.53213, "loss_error": 0.0042, "core": 0.1, "parameters": 1234},
    {"run": "c_d & 5%", "loss": 3.5322, "loss_error": 0.0181, "core": 0.25, "parameters": 99},
    {"run": "_x_ *y*", "loss": None, "core": -0.02, "note": "late"},
]
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
BEST = {"loss": "lowest", "core": "highest"}


def test_markdown_by_hand():
    assert format_table(ROWS, "markdown", best=BEST, titles={"core": "CORE"}) == (
        "| run              |              loss |     CORE | parameters | note |\n"
        "| ---------------- | -----------------:| --------:| ----------:| ---- |\n"
        "| a\\|b &lt;script> | **3.532** ± 0.004 |      0.1 |      1,234 | –    |\n"
        "| c_d &amp; 5%     | **3.532** ± 0.018 | **0.25** |         99 | –    |\n"
        "| \\_x\\_ \\*y\\*      |                 – |    -0.02 |          – | late |\n"
    ), "values that look the same are both bold"


def test_no_cell_of_csv_is_a_formula():
    names = ["=cmd|' /C calc'!A0", "+1", "-x", "@sum", "\t=1"]
    text = format_table([{"run": name, "=1": -2.5} for name in names], "csv")
    table = list(csv.reader(io.StringIO(text)))
    assert table == [["run", "'=1"], *([f"'{name}", "-2.5"] for name in names)]


def test_latex_by_hand():
    assert format_table(ROWS[1:], "latex", best=BEST) == (
        "\\begin{tabular}{lrrrl}\n\\toprule\n"
        "run & loss & core & parameters & note \\\\\n\\midrule\n"
        "c\\_d \\& 5\\% & 3.532 $\\pm$ 0.018 & \\textbf{0.25} & 99 & -- \\\\\n"
        "\\_x\\_ *y* & -- & $-$0.02 & -- & late \\\\\n"
        "\\bottomrule\n\\end{tabular}\n"
    )


@pytest.mark.slow
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\0")), min_size=1))
def test_csv_is_read_back_without_formulas(texts):
    rows = [{"name": text, "loss": len(text) / 7, "loss_error": None} for text in texts]
    back = list(csv.DictReader(io.StringIO(format_table(rows, "csv"), newline="")))
    assert [row["name"] for row in back] == list(map(csv_text, texts))
    assert [float(row["loss"]) for row in back] == [row["loss"] for row in rows]
    assert {row["loss_error"] for row in back} == {""}


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), min_size=1))
def test_markdown_shows_any_text_unchanged(text):
    table = MARKDOWN.render(markdown_table(["x", "y"], [[text, "1"]]))
    (cell,) = re.findall(r"<td>(.*?)</td>", table, re.DOTALL)
    assert "<" not in cell
    assert html.unescape(cell) == text.strip()


def test_markup_in_cells_is_text():
    assert escape_markdown("<b>|`x`") == "&lt;b>\\|\\`x\\`"
    assert escape_markdown("two\nlines") == "two lines"
    assert escape_markdown("low_rate") == "low_rate"


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (3.53213, 0.0042, "3.532 ± 0.004"),
        (3.53213, 0.0142, "3.532 ± 0.014"),
        (12345.6, 321.0, "12,346 ± 321"),
        (2.845e11, None, "2.845e11"),
        (0.5, 0.0, "0.5 ± 0"),
        (math.nan, None, "–"),
        (True, None, "True"),
    ],
)
def test_numbers(value, error, expected):
    assert f" {expected} |" in format_table([{"x": value, "x_error": error}])


def test_an_error_without_its_value_is_a_column_of_its_own():
    assert "x error" in format_table([{"x_error": 1.0}])
    assert "**" not in format_table([{"x": 1.0}], best={"x": "lowest"}), "one value is no best"
    assert format_table([], "csv") == "\n"


def test_unknown_formats_are_named():
    with pytest.raises(ValueError, match=r"'html' is not known\. Use markdown, csv, latex"):
        parcae.format_table(ROWS, "html")  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_latex_compiles(tmp_path):
    rows = [{"run": r'\{}$&#_^~%<>|"μ', "loss": -1.5, "loss_error": 0.1}]
    document = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    (tmp_path / "t.tex").write_text(
        document + format_table(rows, "latex") + r"\end{document}", encoding="utf-8"
    )
    subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )


def test_tables_and_curves_of_notebooks():
    shown = html_table([{"run": "<b>", "loss": 1.23456, "loss_error": 0.01}, {"run": "b"}])
    head = "<table><thead><tr><th>run</th><th>loss</th></tr></thead>"
    assert shown.startswith(f"{head}<tbody><tr><td>&lt;b&gt;</td><td>1.235 ± 0.010</td></tr>")
    curve = html_curve([3.0, math.nan, 1.0], width=100, height=10)
    assert 'points="0.0,0.0 100.0,10.0"' in curve
    assert html_curve([1.0]) == ""
