"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parcae.cli import main
from parcae.presets import PRESETS


def test_presets_as_json(capsys):
    assert main(["presets", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert {entry["name"] for entry in listing} == set(PRESETS)
    by_name = {entry["name"]: entry for entry in listing}
    assert by_name["parcae-140m"]["parameters"] == 144_323_136
    assert by_name["parcae-140m"]["config"]["width"] == 768


def test_presets_as_table(capsys):
    assert main(["presets"]) == 0
    assert "1,338,591,744" in capsys.readouterr().out


def test_show_applies_flags(capsys, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text('[model]\npreset = "parcae-1m"\n')
    assert main(["show", str(recipe), "--model.loop.mean_loops", "3"]) == 0
    printed = capsys.readouterr().out
    assert "mean_loops = 3" in printed
    assert "942,848" in printed
    assert main(["show", "transformer-1m"]) == 0
    assert main(["show", "--model.context_length", "99", "parcae-1m"]) == 0
    assert "context_length = 99" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "parcae-1"], "Did you mean parcae-1m"),
        (["show", "parcae-1m", "--model.widht", "3"], "Did you mean width"),
        (["show", "nowhere.toml"], "no such recipe"),
        (["show", "parcae-1m", "--modle.width", "3"], "Did you mean model"),
        (["show", "/dev/null/x.toml"], "cannot be read"),
        (["presets", "--model.width", "3"], "no such option"),
        (["demo", "--budget.steps", "0"], "budget.steps"),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("parcae: ")
    assert message in captured.err


def test_help_is_fast_and_imports_no_torch():
    script = (
        "import sys\nfrom parcae.cli import parser\nparser()\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m parcae presets --json | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0
    assert not result.stderr


@pytest.mark.slow
def test_demo(tmp_path, capsys):
    small = ["--budget.steps", "6", "--run.sample_tokens", "4", "--run.validation_rows", "4"]
    assert main(["demo", "--out", str(tmp_path), *small]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "looping.png").stat().st_size > 20_000
    assert (tmp_path / "report" / "report.html").stat().st_size > 100_000
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {sample["depth"] for sample in result["samples"]} == {1, 2, 4, 8}
    for words in ("1 loop ", "8 loops", "Look at", "Try next", "held-out loss"):
        assert words in said
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert "holds a finished run" in capsys.readouterr().out
