"""The models of the paper by name, and small ones that train on a laptop.

Names read `<family>-<size>`. The families:

    parcae           stable diagonal injection, in the Transformer setup (nanochat-style blocks)
    transformer      the same blocks, run once
    parcae-rdm       Parcae in the setup of recurrent depth models (SwiGLU, vocabulary 65,536)
    rdm              recurrent depth model with residual normalisation (four norms a block)
    rdm-prenorm      the same with pre-norm blocks: the paper's unstable "Base"
    addition         pre-norm blocks, injection by addition

The paper gives neither heads nor context for the RDM setup; head dimension 128 and context 2,048
are our choice. Parcae in that setup has neither `C` nor a prelude norm: only without them do its
parameter counts match the paper's (see docs/paper-map.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parcae.config import ConfigError, LoopConfig, ModelConfig
from parcae.recipe import build, merge, to_dict
from parcae.schema import suggest


def _looped(width: int, heads: int, thirds: int, vocab: int, context: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        context_length=context,
        width=width,
        heads=heads,
        prelude_layers=thirds,
        core_layers=thirds,
        coda_layers=thirds,
    )


def _transformer(looped: ModelConfig) -> ModelConfig:
    return replace(
        looped,
        architecture="transformer",
        injection="none",
        readout=False,
        prelude_norm=False,
        loop=LoopConfig(mean_loops=1, sampler="fixed"),
    )


def _rdm(
    width: int, mlp_width: int, heads: int, core: int, vocab: int, context: int, mean_loops: int
) -> ModelConfig:
    """The residual-norm model; the other families of its setup differ from it by a few keys."""
    return ModelConfig(
        vocab_size=vocab,
        context_length=context,
        width=width,
        heads=heads,
        mlp_width=mlp_width,
        prelude_layers=1,
        core_layers=core,
        coda_layers=1,
        injection="concatenation",
        readout=False,
        prelude_norm=False,
        mlp="swiglu",
        norm="residual",
        qk_norm=False,
        value_embeddings=False,
        init="scaled",
        loop=LoopConfig(mean_loops=mean_loops),
    )


def _all() -> dict[str, ModelConfig]:
    presets: dict[str, ModelConfig] = {}
    for size, looped in {
        "1m": _looped(64, 2, 1, vocab=4096, context=512),
        "3m": _looped(128, 2, 2, vocab=4096, context=512),
        "10m": _looped(256, 4, 2, vocab=4096, context=512),
        "30m": _looped(448, 7, 2, vocab=8192, context=1024),
        "140m": _looped(768, 6, 2, vocab=32_768, context=2048),
        "370m": _looped(1024, 8, 4, vocab=32_768, context=2048),
        "770m": _looped(1280, 10, 6, vocab=32_768, context=2048),
        "1.3b": _looped(1536, 12, 8, vocab=32_768, context=2048),
    }.items():
        presets[f"parcae-{size}"] = looped
        presets[f"transformer-{size}"] = _transformer(looped)
    for size, rdm in {
        "1m": _rdm(128, 448, 2, 1, vocab=4096, context=512, mean_loops=8),
        "3m": _rdm(224, 768, 4, 1, vocab=4096, context=512, mean_loops=8),
        "100m": _rdm(1024, 3520, 8, 1, vocab=65_536, context=2048, mean_loops=16),
        "350m": _rdm(2048, 7040, 16, 2, vocab=65_536, context=2048, mean_loops=8),
    }.items():
        prenorm = replace(rdm, norm="pre")
        presets[f"rdm-{size}"] = rdm
        presets[f"rdm-prenorm-{size}"] = prenorm
        presets[f"parcae-rdm-{size}"] = replace(prenorm, injection="diagonal")
        presets[f"addition-{size}"] = replace(prenorm, injection="addition")
    return presets


PRESETS: Mapping[str, ModelConfig] = _all()
"""Every model that can be created by name."""


def preset(name: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """A preset by name, with some of its keys changed."""
    if name not in PRESETS:
        raise ConfigError(
            f"preset: no model is called {name!r}. {suggest(name, list(PRESETS))} "
            "`parcae presets` lists all."
        )
    if not overrides:
        return PRESETS[name]
    return build(ModelConfig, merge(to_dict(PRESETS[name]), overrides))


def model_from_table(table: Mapping[str, Any]) -> ModelConfig:
    """The `[model]` table of a recipe: an optional `preset`, then the keys that differ from it."""
    overrides = {key: value for key, value in table.items() if key != "preset"}
    if "preset" in table:
        return preset(str(table["preset"]), overrides)
    return build(ModelConfig, overrides)
