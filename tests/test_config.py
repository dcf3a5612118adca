"""Impossible settings name the key and the remedy; recipes and flags are read strictly."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parcae.config import ConfigError, Curriculum, LoopConfig, ModelConfig
from parcae.presets import PRESETS, model_from_table, preset
from parcae.recipe import build, merge, parse_flags, read_toml, to_dict, write_toml
from parcae.schema import Range

WRONG = [
    ({"heads": 5}, "model.heads", "2 or 4 or 8"),
    ({"heads": 256}, "model.heads", "odd"),
    ({"kv_heads": 3}, "model.kv_heads", "divisor of 4"),
    ({"state_width": 320, "readout": False}, "model.readout", "state_width = 256"),
    ({"state_width": 320, "injection": "addition"}, "model.injection", "which project"),
    ({"state_width": 320, "state_heads": 3}, "model.state_heads", "do not divide state_width"),
    ({"core_layers": 0}, "model.core_layers", "architecture = 'transformer'"),
    ({"prelude_layers": -1}, "model.prelude_layers", "at least 0"),
    ({"injection": "none"}, "model.injection", "'diagonal'"),
    ({"injection": "addition", "discretisation": "zoh"}, "model.discretisation", "diagonal"),
    ({"architecture": "transformer"}, "model.injection", "no loop"),
    ({"vocab_size": 0}, "model.vocab_size", "at least 1"),
    ({"norm_eps": 0.0}, "model.norm_eps", "above 0"),
    ({"norm_eps": float("inf")}, "model.norm_eps", "inf is out of range"),
    ({"rope_theta": -1.0}, "model.rope_theta", "above 0"),
    ({"loop": {"mean_loops": 0}}, "model.loop.mean_loops", "at least 1"),
    ({"loop": {"mean_loops": 1e30}}, "model.loop.mean_loops", "at most 1,024"),
    ({"loop": {"backprop_loops": 0}}, "model.loop.backprop_loops", "at least 1"),
    (
        {"loop": {"sampler": "poisson-fill", "backprop_loops": 9}},
        "model.loop.backprop_loops",
        "at most mean_loops = 8",
    ),
    (
        {"loop": {"sampler": "lognormal-fill", "backprop_loops": 8}},
        "model.loop.backprop_loops",
        "below mean_loops = 8",
    ),
    ({"loop": {"sampler": "fixed", "mean_loops": 2.5}}, "model.loop.mean_loops", "integer"),
    (
        {"loop": {"sampler": "poisson-fill", "curriculum": {"steps": 9}}},
        "model.loop.curriculum",
        "'poisson'",
    ),
    ({"loop": {"curriculum": {"steps": 0}}}, "model.loop.curriculum.steps", "at least 1"),
    ({"widht": 3}, "model.widht", "Did you mean width"),
    ({"loop": {"mean_lops": 3}}, "model.loop.mean_lops", "Did you mean mean_loops"),
    ({"width": "wide"}, "model.width", "a whole number"),
    ({"width": True}, "model.width", "a whole number"),
    ({"width": 25.5}, "model.width", "a whole number"),
    ({"readout": 1}, "model.readout", "true or false"),
    ({"mlp": "gelu"}, "model.mlp", "relu2"),
    ({"loop": 8}, "model.loop", "a table"),
    ({"rope_theta": "big"}, "model.rope_theta", "a number"),
]


@pytest.mark.parametrize(("change", "key", "remedy"), WRONG)
def test_impossible_settings(change, key, remedy):
    with pytest.raises(ConfigError) as error:
        preset("parcae-10m", change)
    assert str(error.value).startswith(f"{key}: ")
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelConfig(mlp="gelu"),
        lambda: ModelConfig(norm="post"),
        lambda: ModelConfig(architecture="transfomer"),
        lambda: ModelConfig(width="768"),
        lambda: ModelConfig(readout=1),
        lambda: LoopConfig(sampler="posson"),
        lambda: LoopConfig(mean_loops=float("inf")),
        lambda: LoopConfig(mean_loops=True),
        lambda: Curriculum(kind="cosine"),
        lambda: dataclasses.replace(preset("parcae-1m"), injection="diagnoal"),
    ],
)
def test_a_configuration_made_by_hand_is_checked_too(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    "change",
    [
        {"width": "wide"},
        {"width": 25.5},
        {"readout": 1},
        {"mlp": "gelu"},
        {"heads": 0},
        {"norm_eps": float("nan")},
        {"value_layers": 3},
        {"loop": 8},
        {"injection": "diagnoal"},
        {"heads": 5},
    ],
)
def test_a_mistake_gives_the_same_message_from_python_and_from_a_recipe(change):
    with pytest.raises(ConfigError) as by_hand:
        ModelConfig(**change)
    with pytest.raises(ConfigError) as from_recipe:
        model_from_table(change)
    assert str(by_hand.value) == str(from_recipe.value)
    assert str(by_hand.value).startswith(f"model.{next(iter(change))}: ")


def test_every_setting_has_one_line_of_help_and_a_valid_default():
    from parcae.training.settings import all_settings

    entries = list(all_settings())
    assert len({(entry.table, entry.name) for entry in entries}) == len(entries) > 70
    for entry in entries:
        assert 5 < len(entry.help) < 125, entry.name
        assert not entry.help.endswith("."), entry.name
        unset = entry.default is None or entry.default == ()
        optional = entry.name in ("preset", "sources", "trackers", "sample_prompts")
        if unset and not optional and entry.table.table != "budget":
            assert "(unset: " in entry.help, entry.name


def test_ranges():
    span = Range(at_least=0, below=1)
    assert [x in span for x in (-1, 0, 0.5, 1, math.nan, math.inf)] == [False, True, True] + [
        False
    ] * 3
    assert str(span) == "at least 0 and below 1"
    assert math.inf not in Range()
    assert "3" not in Range()


def test_what_poisson_can_draw_is_allowed():
    for settings in (
        {"mean_loops": 8, "backprop_loops": 8},
        {"mean_loops": 4, "backprop_loops": 9},
        {"mean_loops": 8, "backprop_loops": 8, "sampler": "poisson-fill"},
        {"mean_loops": 1, "sampler": "lognormal-fill"},
        {"mean_loops": 2.5},
    ):
        build(LoopConfig, settings)


def test_gradient_loops_follow_the_papers_rule():
    assert [LoopConfig(mean_loops=m).gradient_loops for m in (1, 2, 3, 8, 12)] == [1, 1, 2, 4, 6]
    assert LoopConfig(mean_loops=8, backprop_loops=3).gradient_loops == 3


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("parcae-10m").width = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_toml(name, tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(write_toml({"model": to_dict(PRESETS[name])}))
    assert model_from_table(read_toml(path)["model"]) == PRESETS[name]


def test_curriculum_survives_toml(tmp_path):
    config = preset("parcae-1m", {"loop": {"curriculum": {"kind": "1-sqrt", "steps": 7}}})
    assert config.loop.curriculum == Curriculum(kind="1-sqrt", steps=7)
    path = tmp_path / "model.toml"
    path.write_text(write_toml({"model": to_dict(config)}))
    assert model_from_table(read_toml(path)["model"]) == config


def test_flags_over_recipe_over_preset(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[model]\npreset = "parcae-10m"\ncontext_length = 256\n[model.loop]\nmean_loops = 4\n'
    )
    flags = parse_flags(["--model.loop.mean-loops", "6", "--model.tied_embeddings=false"])
    config = model_from_table(merge(read_toml(path), flags)["model"])
    assert config.loop.mean_loops == 6
    assert config.context_length == 256
    assert config.width == 256
    assert not config.tied_embeddings


def test_flags_are_typed_like_toml():
    tree = parse_flags(["--a.b", "3", "--a.c", "8e-3", "--a.d", "true", "--a.e", "poisson"])
    assert tree == {"a": {"b": 3, "c": 8e-3, "d": True, "e": "poisson"}}


@pytest.mark.parametrize("arguments", [["--width", "3"], ["model.width", "3"], ["--model.width"]])
def test_flags_that_are_no_settings(arguments):
    with pytest.raises(ConfigError):
        parse_flags(arguments)


@given(st.text(max_size=20))
def test_any_flag_value_is_a_value_or_a_clear_error(text):
    with contextlib.suppress(ConfigError):
        assert "width" in parse_flags([f"--model.width={text}"])["model"]


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"[model\n", "not valid TOML"), (b"\xff\xfe", "not UTF-8")],
)
def test_unreadable_recipes(tmp_path, content, error):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=error):
        read_toml(path)
    with pytest.raises(ConfigError, match="no such recipe"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="a folder"):
        read_toml(tmp_path)


def test_value_embeddings_end_on_the_last_layer():
    config = ModelConfig(width=64, heads=2)
    assert [layer for layer in range(6) if config.has_value_embedding(layer)] == [1, 3, 5]
    odd = ModelConfig(width=64, heads=2, prelude_layers=1, core_layers=1, coda_layers=1)
    assert [layer for layer in range(3) if odd.has_value_embedding(layer)] == [0, 2]
