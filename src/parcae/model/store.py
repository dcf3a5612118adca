"""A model folder: `config.json` and `model.safetensors`, written and read.

`read_model` also takes a folder in transformers' format, by `hf_format.py`, and in that of the
reference release, by `release.py`. Checksums of a
run's checkpoints are verified by `parcae.runs`, which `parcae.load` goes through.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from parcae.config import ConfigError, ModelConfig
from parcae.files import (
    FileError,
    WriteError,
    atomic_path,
    check_regular,
    flush,
    read_json,
    to_json,
)
from parcae.model import CONFIG_FILE, INDEX_FILE, SHARD_PATTERN, WEIGHTS_FILE, build
from parcae.model.base import LanguageModel
from parcae.recipe import build as build_config
from parcae.recipe import to_dict
from parcae.schema import shorten

FORMAT = "parcae"
VERSION = 1
SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def save(model: LanguageModel, folder: str | Path) -> Path:
    """Write a model's configuration and weights; each file is whole or absent.

    Both are on the disk before the first takes its name, so that a kill in between, which would
    pair the files of two models, has only an instant to happen.
    """
    folder = Path(folder)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    with (
        atomic_path(folder / WEIGHTS_FILE) as new_weights,
        atomic_path(folder / CONFIG_FILE) as new_config,
    ):
        write_weights(weights, new_weights)
        flush(new_weights)
        new_config.write_text(to_json(header(model.config)), encoding="utf-8")
    return folder


def write_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write a file of weights; safetensors has an error of its own for a full disk."""
    try:
        save_tensors(weights, path, {"format": "pt"})
    except SafetensorError as error:
        raise WriteError(f"{path}: could not be written ({error}).") from None


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file that others may read if the umask allows it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)  # replaces it by a file that only the user may read
    path.chmod(mode)


def header(config: ModelConfig) -> dict[str, Any]:
    """What config.json says."""
    return {"format": FORMAT, "version": VERSION, "model": to_dict(config)}


def read_model(folder: Path, device: str | torch.device = "cpu") -> LanguageModel:
    """The model in a model folder, in evaluation mode. Checksums are not verified here."""
    from parcae.model.hf_format import is_hf, read_hf
    from parcae.model.release_format import is_release, read_release

    content = read_json(folder / CONFIG_FILE)
    if is_release(content):
        config, weights = read_release(folder, content)
    elif is_hf(content):
        config, weights = read_hf(folder, content)
    else:
        config, weights = _own_config(folder, content), read_weights(folder / WEIGHTS_FILE)
    if config.layers > len(weights):  # before a module is made for each layer
        raise FileError(
            f"{folder}: {config.layers:,} layers, but the weights have {len(weights):,} tensors."
        )
    model = build(config)
    assign(model, weights, folder)
    return model.to(device).eval()


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a model folder."""
    from parcae.model.hf_format import from_hf_config, is_hf
    from parcae.model.release_format import is_release, read_release

    content = read_json(folder / CONFIG_FILE)
    if is_hf(content):
        return from_hf_config(content)
    return read_release(folder, content)[0] if is_release(content) else _own_config(folder, content)


def _own_config(folder: Path, content: Any) -> ModelConfig:
    if isinstance(content, dict) and content.get("format") == FORMAT:
        if content.get("version") != VERSION:
            raise FileError(
                f"{folder / CONFIG_FILE}: format version {shorten(content.get('version'))}, but "
                f"this parcae reads version {VERSION}. Update parcae."
            )
        try:
            return build_config(ModelConfig, content.get("model", {}))
        except ConfigError as error:
            raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from None
    raise FileError(
        f"{folder / CONFIG_FILE}: neither a parcae checkpoint (format = 'parcae'), nor one of "
        "`parcae export` (model_type = 'parcae'), nor the reference release's (_class_name)."
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """One file, or those in its place: shards of processes, or what an index names."""
    if not path.exists():
        if shards := sorted(path.parent.glob(SHARD_PATTERN)):
            return _join(path.parent, shards)
        if (path.parent / INDEX_FILE).exists():
            return _read_indexed(path.parent / INDEX_FILE)
    return _read_file(path)


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        check_regular(path)
        return load_file(path)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file. Is the checkpoint complete?") from None
    except FileError:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError, MemoryError) as error:
        reason = str(error)[:300]
        raise FileError(f"{path}: cannot be read ({reason}). Is it truncated?") from None


def _read_indexed(index: Path) -> dict[str, Tensor]:
    """The tensors of the files that an index names; they must be those that it says."""
    content = read_json(index)
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise FileError(f"{index}: no weight_map. Save the model again.")
    wrong = [f for f in file_of.values() if not isinstance(f, str) or not SHARD_NAME.fullmatch(f)]
    if wrong:
        raise FileError(
            f"{index}: {shorten(wrong[0])} is not the name of a file beside it, NAME.safetensors."
        )
    weights: dict[str, Tensor] = {}
    for file in sorted(set(file_of.values())):
        tensors = _read_file(index.parent / file)
        for name in sorted(tensors.keys() | {n for n, f in file_of.items() if f == file}):
            if name not in tensors or file_of.get(name) != file:
                raise FileError(f"{index}: {shorten(name)} of {file} is missing in one of the two.")
        weights |= tensors
    return weights


def _join(folder: Path, shards: Sequence[Path]) -> dict[str, Tensor]:
    """Whole tensors from the shards of `torch.distributed.checkpoint` in safetensors files."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    try:
        for path in shards:  # torch.distributed believes what their headers say
            check_regular(path)
            with safe_open(path, "pt"):
                pass
        reader = HuggingFaceStorageReader(str(folder))
        stored: Any = reader.read_metadata().state_dict_metadata
        needed = sum(math.prod(s.size) * s.properties.dtype.itemsize for s in stored.values())
        size = sum(path.stat().st_size for path in shards)
        if needed > size:
            raise ValueError(f"{needed:,} bytes of tensors in files of {size:,} bytes")
        weights = {n: torch.empty(s.size, dtype=s.properties.dtype) for n, s in stored.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process is known
            load_shards(weights, storage_reader=reader, no_dist=True)
    except Exception as error:  # of any kind, where names or headers are not as it writes them
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
        raise FileError(f"{folder}: its shards of weights cannot be read ({reason}).") from None
    return weights


def assign(model: LanguageModel, weights: Mapping[str, Tensor], source: Path) -> None:
    """Assign tensors to parameters. Missing, unexpected and wrongly shaped ones are errors."""
    check_weights(model.state_dict(), weights, source)
    model.load_state_dict(dict(weights), strict=True, assign=True)
    model.requires_grad_(True)


def check_weights(
    expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], source: Path
) -> None:
    """Raise FileError unless the weights have the expected names and shapes, and are floats."""
    problems = [f"missing {name}" for name in expected if name not in weights]
    problems += [f"unexpected {name}" for name in weights if name not in expected]
    problems += [
        f"{name} is {[*tensor.shape]}, the model needs {[*expected[name].shape]}"
        for name, tensor in weights.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    problems += [
        f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, not floats of 16, 32 or 64 bits"
        for name, tensor in weights.items()
        if tensor.dtype not in DTYPES
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (
            f"; and {len(problems) - 8} more" if problems[8:] else ""
        )
        raise FileError(f"{source}: the weights do not fit the configuration: {shown}.")
