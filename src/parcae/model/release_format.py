"""Reads the reference release's format: `config.json` with `_class_name`, `pytorch_model.bin`.

The tensors are the same as ours, one for one; only the names differ. Every key of the file is
accounted for, and a setting that would change the mathematics in a way we do not implement is an
error, never a silent difference.
"""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parcae.config import MAX_LAYERS, MAX_LOOPS, ConfigError, LoopConfig, ModelConfig
from parcae.files import FileError, check_regular
from parcae.schema import shorten

LOOPED, FIXED = "ParcaeConfig", "GPTConfig"

SAMPLERS = {
    "poisson-truncated-full": "poisson",
    "poisson-full": "poisson-full",
    "poisson-fill": "poisson-fill",
    "fixed": "fixed",
}
INJECTIONS = {"diagonal": "diagonal", "linear": "concatenation", "add": "addition"}
MLPS = {("BaseMLP", "ReLU2"): "relu2", ("GatedMLP", "SiLU"): "swiglu"}
MUST_BE: dict[str, Any] = {
    "block_class_name": "TransformerPreNormBlock",
    "norm_class_name": "RMSNorm",
    "bias": False,
    "qk_bias": False,
    "clip_qkv": None,
    "logit_softcap": None,
    "debias_attention": False,
    "center_attention": False,
    "use_abacus": False,
    "randomize_positions_from": None,
    "mup_model_scaling_factor": 1,
    "init_strategy": "scaled-zero",  # the other strategies also scale embeddings or logits
}

COUNTS = {
    **dict.fromkeys(
        ("n_layer", "n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda"),
        MAX_LAYERS,
    ),
    **dict.fromkeys(("mean_recurrence", "mean_backprop_depth"), MAX_LOOPS),
}
"""The largest values of counts that are used before the configuration is checked."""

_BLOCK = {
    "norm_1": "norm_attn",
    "attn.c_q": "attn.q",
    "attn.c_k": "attn.k",
    "attn.c_v": "attn.v",
    "attn.c_proj": "attn.out",
    "attn.ve_gate": "attn.gate",
    "norm_2": "norm_mlp",
    "mlp.fc": "mlp.fc",
    "mlp.proj": "mlp.proj",
}
_STACK = {
    "prelude": "prelude.blocks",
    "core_block": "loop.core.blocks",
    "coda": "coda.blocks",
    "h": "blocks",
}
_SINGLE = {
    "transformer.wte.weight": "embed.weight",
    "transformer.adapter.A_log": "loop.core.injection.log_A",
    "transformer.adapter.dt_bias": "loop.core.injection.dt_bias",
    "transformer.adapter.B": "loop.core.injection.B",
    "transformer.adapter.adapter.weight": "loop.core.injection.W",
    "transformer.C.weight": "coda.readout.weight",
    "transformer.ln_prelude.weight": "prelude.norm.weight",
    "lm_head.weight": "head.weight",
}


def is_release(header: Any) -> bool:
    return isinstance(header, dict) and "_class_name" in header


def our_name(key: str, kind: str = LOOPED) -> str | None:
    """The name in this package for a key of the release; None for an unknown key."""
    if key == "transformer.ln_f.weight":
        return "coda.norm.weight" if kind == LOOPED else "norm.weight"
    if key in _SINGLE:
        return _SINGLE[key]
    if match := re.fullmatch(r"value_embeds\.(\d+)\.weight", key):
        return f"value_tables.{match[1]}.weight"
    match = re.fullmatch(r"transformer\.(\w+)\.(\d+)\.(.+)\.weight", key)
    if match and match[1] in _STACK and match[3] in _BLOCK:
        return f"{_STACK[match[1]]}.{match[2]}.{_BLOCK[match[3]]}.weight"
    return None


def read_release(folder: Path, header: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and weights of a release folder, under the names of this package."""
    if header["_class_name"] not in (LOOPED, FIXED):
        name = shorten(header["_class_name"])
        raise FileError(f"config.json: _class_name {name}; {LOOPED} and {FIXED} are known.")
    for key, most in COUNTS.items():
        value = header.get(key, 0)
        if not isinstance(value, int | float) or not 0 <= value <= most:
            raise FileError(f"config.json: {key} = {shorten(value)}; it must be 0 to {most:,}.")
    found = _read_tensors(folder)
    weights: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in found.items():
        name = our_name(key, header["_class_name"])
        if name is not None:
            weights[name] = tensor
        elif key != "freqs_cis":  # a stored table of angles; ours are computed
            unknown.append(key)
    if unknown:
        raise FileError(f"{folder}: keys that no part of the model has: {', '.join(unknown)}.")
    try:
        value_layers = _drop_unused(weights, header)
        config = _translate(header, weights, value_layers)
    except ConfigError as error:
        raise FileError(f"{folder / 'config.json'}: {error}") from None
    except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        reason = str(error)[:300]
        raise FileError(f"{folder / 'config.json'}: missing or malformed key: {reason}.") from None
    if config.tied_embeddings:
        head = weights.pop("head.weight", None)
        if head is not None and not torch.equal(head, weights.get("embed.weight", head)):
            raise FileError(
                f"{folder}: tie_embeddings is true, but lm_head.weight differs from wte.weight."
            )
    return config, weights


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from parcae.model import INDEX_FILE, WEIGHTS_FILE
    from parcae.model.store import read_weights

    if (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists():
        return read_weights(folder / WEIGHTS_FILE)
    path = folder / "pytorch_model.bin"
    if not path.exists():
        raise FileError(f"{folder}: neither {WEIGHTS_FILE} nor {path.name} exists.")
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:  # what is compressed could be of any size
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("compressed, which torch.save never does")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileError:
        raise
    except Exception as error:  # torch.load raises errors of all kinds for damaged files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise FileError(f"{path}: cannot be read as plain tensors ({reason}).") from None
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors.values())):
        raise FileError(f"{path}: not a dictionary of plain tensors.")
    if not all(isinstance(name, str) for name in tensors):
        raise FileError(f"{path}: its tensors have no names.")
    return tensors


def _is_plain(value: object) -> bool:
    """A dense tensor with memory for each of its elements: an expanded one would grow when used."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.numel() * value.itemsize <= value.untyped_storage().nbytes()
    )


def _translate(
    header: Mapping[str, Any], weights: Mapping[str, Tensor], value_layers: tuple[int, ...]
) -> ModelConfig:
    kind = header["_class_name"]
    for key, value in MUST_BE.items():
        if header.get(key, value) != value:
            found = shorten(header[key])
            raise FileError(f"config.json: {key} = {found} is not supported, only {value!r}.")
    rope = header.get("rope_settings") or {}
    if not rope.get("use_rope", True) or rope.get("rope_condense_ratio", 1) != 1:
        found = shorten(rope)
        raise FileError(f"config.json: rope_settings {found} are not supported; use plain RoPE.")
    mlp = (header.get("mlp_class_name", "BaseMLP"), header.get("nonlin_name", "ReLU2"))
    shared: dict[str, Any] = {
        "vocab_size": _padded_vocab(header),
        "context_length": header["block_size"],
        "width": header["n_embd"],
        "heads": header["num_attention_heads"],
        "kv_heads": header.get("num_key_value_heads"),
        "mlp_width": header.get("intermediate_size"),
        "mlp": _known("mlp_class_name, nonlin_name", mlp, MLPS),
        "norm_eps": header.get("norm_eps", 1e-5),
        "qk_norm": header.get("qk_norm", False),
        "value_embeddings": any("value_tables." in name or ".gate." in name for name in weights),
        "value_layers": value_layers,
        "rope_theta": float(rope.get("rope_base", 50_000)),
        "tied_embeddings": header.get("tie_embeddings", False),
    }
    if kind == FIXED:
        return ModelConfig(
            architecture="transformer",
            prelude_layers=0,
            core_layers=header["n_layer"],
            coda_layers=0,
            injection="none",
            readout=False,
            prelude_norm=False,
            loop=LoopConfig(mean_loops=1, sampler="fixed"),
            **shared,
        )
    draw_per = _known(
        "recurrent_iteration_method",
        header.get("recurrent_iteration_method", "per-batch"),
        {"per-sequence": "sequence", "per-batch": "micro-batch"},
    )
    sampler = _known("sampling_scheme", header["sampling_scheme"], SAMPLERS)
    if sampler == "poisson" and draw_per == "micro-batch":
        sampler = "release-per-batch"
    heads = header.get("recurrent_num_attention_heads") or header["num_attention_heads"]
    return ModelConfig(
        prelude_layers=header["n_layers_in_prelude"],
        core_layers=header["n_layers_in_recurrent_block"],
        coda_layers=header["n_layers_in_coda"],
        state_width=header["recurrent_embedding_dimension"],
        state_heads=heads,
        state_kv_heads=heads,
        state_mlp_width=header["recurrent_intermediation_embedding_dimension"],
        injection=_known("injection_type", header["injection_type"], INJECTIONS),
        readout=True,
        prelude_norm=header.get("prelude_norm", False),
        loop=LoopConfig(
            mean_loops=header["mean_recurrence"],
            backprop_loops=header["mean_backprop_depth"],
            sampler=sampler,
            draw_per=draw_per,
            state_init=_known(
                "state_init",
                header.get("state_init", "like-init"),
                {"like-init": "like-init", "zero": "zero"},
            ),
        ),
        **shared,
    )


def _padded_vocab(header: Mapping[str, Any]) -> int:
    padded = header.get("padded_vocab_size")
    if padded is not None:
        return padded
    multiple = header.get("padding_multiple", 64)
    return math.ceil(header["vocab_size"] / multiple) * multiple


def _known(key: str, value: Any, table: Mapping[Any, Any]) -> Any:
    if value not in table:
        found = shorten(value)
        raise FileError(f"config.json: {key} = {found} is not supported, only {[*table]}.")
    return table[value]


def _value_layers(header: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """The layers for which the release makes a value table, and those for which it makes a gate.

    It numbers layers differently for the two: tables over prelude, core and coda, unlooped; gates
    with the core unrolled to its mean, against a depth of core layers times backpropagated loops.
    A value is added where both exist; in some shapes one stands alone, and is never used.
    """
    if header["_class_name"] == FIXED:
        layers = header["n_layer"]
        both = {layer for layer in range(layers) if layer % 2 == (layers - 1) % 2}
        return both, both
    prelude, core = header["n_layers_in_prelude"], header["n_layers_in_recurrent_block"]
    layers = prelude + core + header["n_layers_in_coda"]
    skipped = core * (header["mean_recurrence"] - 1)  # the coda's numbers are this much higher
    parity = (core * header["mean_backprop_depth"] - 1) % 2
    numbers = {x: x if x < prelude + core else x + skipped for x in range(layers)}
    tables = {layer for layer in range(layers) if layer % 2 == (layers - 1) % 2}
    return tables, {layer for layer, number in numbers.items() if number % 2 == parity}


def _drop_unused(weights: dict[str, Tensor], header: Mapping[str, Any]) -> tuple[int, ...]:
    """Remove tables without a gate and gates without a table; returns the layers with both."""
    tables, gates = _value_layers(header)
    unused = [f"value_tables.{layer}.weight" for layer in tables - gates]
    unused += [_gate_name(layer, header) for layer in gates - tables]
    omitted = [name for name in unused if weights.pop(name, None) is not None]
    if omitted:
        message = f"omitted weights that the release never uses: {', '.join(omitted)}"
        warnings.warn(message, stacklevel=4)
    return tuple(sorted(tables & gates))


def _gate_name(layer: int, header: Mapping[str, Any]) -> str:
    if header["_class_name"] == FIXED:
        return f"blocks.{layer}.attn.gate.weight"
    first = 0
    for stack, key in (
        ("prelude.blocks", "n_layers_in_prelude"),
        ("loop.core.blocks", "n_layers_in_recurrent_block"),
        ("coda.blocks", "n_layers_in_coda"),
    ):
        if layer < first + header[key]:
            return f"{stack}.{layer - first}.attn.gate.weight"
        first += header[key]
    raise ValueError(f"there is no layer {layer}")
