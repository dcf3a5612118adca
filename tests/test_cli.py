"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys

import pytest

from parcae import cli
from parcae.cli import main
from parcae.presets import PRESETS
from parcae.training.settings import TABLES, all_settings


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
        (["trian", "recipe.toml"], "trian: no such command. Did you mean train?"),
        (["data", "inspct", "out"], "Did you mean inspect? See parcae data --help."),
        (["presets", "--jsno"], "--jsno: no such option. Did you mean --json?"),
        (["eval", "run", "--suit", "core"], "--suit: no such option. Did you mean --suites?"),
        (["presets", "parcae-1m"], "parcae-1m: one argument too many"),
        (
            ["train", "recipe.toml", "--reusme=out"],
            "--reusme: no such option. Did you mean",
        ),
        (["generate", "run", "--wieght-dtype", "int8"], "Did you mean --weight-dtype?"),
        (
            ["generate", "run", "--weight-dtype", "int9"],
            "'int9' is not an option. Did you mean int8?",
        ),
        (["show", "parcae-1"], "Did you mean parcae-1m? `parcae presets` lists all."),
        (["show", "parcae-1m", "--model.widht", "3"], "Did you mean width"),
        (["show", "nowhere.toml"], "no such recipe"),
        (["show", "parcae-1m", "--modle.width", "3"], "Did you mean model"),
        (["show", "/dev/null/x.toml"], "cannot be read"),
        (["presets", "--model.width", "3"], "no such option"),
        (["demo", "--budget.steps", "0"], "budget.steps"),
        (["generate", "run", "--loops", "2.5"], "--loops: expected a whole number, got '2.5'."),
        (["train", "."], ".: a folder, not a recipe. Name a .toml file, or continue the run in it"),
        (["train", "demo", "--from", "run"], "--from: no such option. Did you mean --start-from?"),
        (
            ["train", "demo", "--steps", "9"],
            "--steps: no such option. Did you mean --budget.steps?",
        ),
        (["plan", "demo", "--micro_batch=4"], "Did you mean --data.micro_batch?"),
        (["generate", "run", "--steps", "9"], "--steps: no such option. Did you mean --stop?"),
        (["train", "demo", "--data.context_length", "9"], "Did you mean model.context_length?"),
        (["train", "demo", "--model.mean_loops", "9"], "Did you mean model.loop.mean_loops?"),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("parcae: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "part"), [([], "commands:"), (["data"], "inspect"), (["tokenizer"], "train")]
)
def test_without_a_command_there_is_help(capsys, arguments, part):
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: " + " ".join(["parcae", *arguments]))
    assert part in captured.out
    assert not captured.err


WITHOUT_TORCH = {
    "": 0,
    "--help": 0,
    "--version": 0,
    "train --help": 0,
    "trian": 2,
    "train": 2,
    "train recipe.toml --resume run": 2,
    "train none.toml": 2,
    "train --resume none": 2,
    "plan none.toml": 2,
    "show parcae-1": 2,
    "demo --budget.steps 0": 2,
    "generate none --lops 3": 2,
    "generate none a b": 2,
    "depth none text --out depth.txt": 2,
    "depth none text --loops 0": 2,
}


@pytest.mark.slow
def test_help_and_wrong_usage_need_no_torch():
    """Which takes seconds to import."""
    script = f"""
import sys
from parcae.cli import main
for line, expected in {WITHOUT_TORCH}.items():
    try:
        code = main(line.split())
    except SystemExit as end:
        code = end.code
    assert code == expected, line
    for heavy in ("torch", "numpy", "matplotlib", "tokenizers"):
        assert heavy not in sys.modules, f"{{line}} imports {{heavy}}"
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_error_of_a_recipe_names_its_file_and_one_of_a_flag_does_not(capsys, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[model]\npreset = "parcae-1m"\nwidht = 3\n')
    assert main(["show", str(recipe)]) == 2
    assert f"parcae: {recipe}: model.widht: no such key." in capsys.readouterr().err
    recipe.write_text('[model]\npreset = "parcae-1m"\n')
    assert main(["show", str(recipe), "--model.widht", "3"]) == 2
    assert "parcae: model.widht: no such key." in capsys.readouterr().err


@pytest.mark.slow
def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m parcae presets --json | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0
    assert not result.stderr


def all_parsers(parser=None):
    """Every parser of the command line, subcommands included."""
    parser = cli.parser() if parser is None else parser
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from all_parsers(child)


@pytest.mark.parametrize("parser", [*all_parsers()], ids=lambda parser: parser.prog)
def test_every_option_says_what_it_does_and_its_default(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                assert choice.help, f"{parser.prog} {choice.dest}"
            continue
        name = action.option_strings[-1] if action.option_strings else action.metavar
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        assert len(text) >= 10, f"{parser.prog} {name}: {text!r} says too little"
        has_default = action.default not in (None, False, (), [], argparse.SUPPRESS)
        if action.option_strings and has_default:
            assert "default" in text, f"{parser.prog} {name}: {text!r} names no default"


def test_the_help_of_train_lists_every_setting(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for table in (*TABLES, "model.loop", "model.loop.curriculum"):
        assert any(line.startswith(f"  [{table}]  ") for line in lines), table
    for entry in all_settings():
        assert entry.help, entry.name
        assert any(line.startswith(f"    {entry.name} ") for line in lines), entry.name
    assert "mean_loops            8 " in printed
    assert "kv_heads              - " in printed


def test_messages_name_options_instead_of_parameters():
    arguments = cli.parser().parse_args(["eval", "RUN"])
    message = "x: none. Give `task_data` or `data.sources`, see `parcae data`."
    expected = "x: none. Give --task-data or `data.sources`, see `parcae data`."
    assert cli.name_options(message, arguments) == expected
    arguments = cli.parser().parse_args(["train", "RECIPE"])
    assert cli.name_options("Use `data.sources`.", arguments) == "Use --data.sources."
    assert cli.name_options("Use `out`.", None) == "Use `out`."


def test_an_error_of_the_system_is_one_line(monkeypatch, capsys):
    def full(_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")

    monkeypatch.delenv("PARCAE_DEBUG", raising=False)
    monkeypatch.setattr("parcae.commands.presets.run", full)
    assert main(["presets"]) == 2
    assert capsys.readouterr().err == "parcae: some/file: No space left on device.\n"
    monkeypatch.setenv("PARCAE_DEBUG", "1")
    with pytest.raises(OSError, match="No space"):
        main(["presets"])
