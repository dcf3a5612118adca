"""Write a model as a folder for transformers, vLLM and the Hugging Face hub.

    parcae.export("runs/first", "exported/first")
    AutoModelForCausalLM.from_pretrained("exported/first", trust_remote_code=True)

With the weights go the tokenizer, the modelling code (see `remote_code.py`), the defaults of
generation and a model card with the numbers of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from tokenizers import processors

from parcae import console, plotting
from parcae.files import atomic_folder, check_new, to_json
from parcae.model import CONFIG_FILE, WEIGHTS_FILE, flops
from parcae.model.hf_format import MODEL_TYPE, to_hf_config, to_hf_weights
from parcae.model.store import write_weights
from parcae.runs import open_checkpoint, read_recipe_table, read_result, run_of
from parcae.runs.layout import TOKENIZER_FILE

if TYPE_CHECKING:
    from parcae.config import ModelConfig
    from parcae.data.tokenizer import Tokenizer
    from parcae.model.base import LanguageModel

PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")
CARD_FILE = "README.md"
FIGURE_FILE = "loss.png"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    source: str | Path,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    best: bool = False,
    dtype: str = "float32",
) -> Path:
    """Write the model of a run, a checkpoint or a model folder for transformers; returns `folder`.

    `tokenizer` and `best` are those of `parcae.open_checkpoint`. The folder must not exist; it
    gets its name when all files are written.
    """
    folder = Path(folder)
    check_new(folder)
    checkpoint = open_checkpoint(source, tokenizer=tokenizer, best=best)
    with atomic_folder(folder) as new:
        special = _write_tokenizer(new, checkpoint.tokenizer, checkpoint.model.config)
        _write_model(new, checkpoint.model, special, dtype)
        _write_card(new, folder.name, checkpoint.model, run_of(checkpoint.folder))
    return folder


def _write_model(
    folder: Path, model: LanguageModel, special: Mapping[str, int], dtype: str
) -> None:
    from parcae.hub.remote_code import AUTO_MAP, write_code

    config = {
        "architectures": ["ParcaeForCausalLM"],
        "auto_map": AUTO_MAP,
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        **special,
        **to_hf_config(model.config),
    }
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / "generation_config.json", special)
    weights = to_hf_weights(model.state_dict(), model.config)
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
    write_weights(weights, folder / WEIGHTS_FILE)
    write_code(folder)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> dict[str, int]:
    """Write the tokenizer; returns the ids of its special tokens, by their names in config.json.

    That texts start with BOS is written into it as a template. BOS also ends texts, since another
    one follows it in training. Padding has a token of its own, because trainers do not learn it.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer.content)
    bos = backend.id_to_token(tokenizer.bos)
    assert bos is not None
    special = {"bos_token": bos, "eos_token": bos}
    if pad := _pad_token(backend, config.vocab_size):
        special["pad_token"] = pad
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{bos}:0 $A:0",
        pair=f"{bos}:0 $A:0 $B:1",
        special_tokens=[(bos, tokenizer.bos)],
    )
    (folder / TOKENIZER_FILE).write_text(backend.to_str(pretty=True), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": config.context_length,
            "clean_up_tokenization_spaces": False,
        },
    )
    ids = backend.get_vocab(with_added_tokens=True)
    return {f"{name}_id": ids[token] for name, token in special.items()}


def _pad_token(backend: tokenizers.Tokenizer, rows: int) -> str | None:
    """The tokenizer's own, or one that is added where the embedding has a row that no id uses."""
    ids = backend.get_vocab(with_added_tokens=True)
    for name in PAD_NAMES:
        if name in ids:
            return name
    if not max(ids.values()) + 1 == len(ids) < rows:
        return None
    backend.add_special_tokens([PAD_NAMES[0]])
    return PAD_NAMES[0]


def _write_card(folder: Path, name: str, model: LanguageModel, run: Path | None) -> None:
    result = _result(run)
    losses = {int(t): loss["loss"] for t, loss in (result.get("validation") or {}).items()}
    if len(losses) > 1:
        _draw_losses(folder / FIGURE_FILE, losses, model.config.loop.nominal_loops)
    card = _card(name, model.config, result, losses, _sources(run))
    (folder / CARD_FILE).write_text(card, encoding="utf-8")


def _result(run: Path | None) -> dict[str, Any]:
    result = None if run is None else read_result(run)
    return {} if result is None else result.to_dict()


def _sources(run: Path | None) -> list[str]:
    """Names of the data, without the folders of the machine it was trained on."""
    if run is None:
        return []
    sources = read_recipe_table(run).get("data", {}).get("sources", [])
    return [Path(str(source)).name for source in sources]


def _draw_losses(path: Path, losses: Mapping[int, float], mean_loops: int) -> None:
    with plotting.figure() as (canvas, axes):
        axes.plot(list(losses), list(losses.values()), marker="o")
        axes.axvline(mean_loops, color=plotting.LIGHT_GREY, linestyle=":")
        axes.set(xlabel="loops T", ylabel="held-out loss, nats per token", xscale="log")
        axes.set_xticks(list(losses), [str(t) for t in losses], minor=False)
        axes.minorticks_off()
        axes.set_title("Loss against loops")
        plotting.save(canvas, path)


def _card(
    name: str,
    config: ModelConfig,
    result: Mapping[str, Any],
    losses: Mapping[int, float],
    sources: list[str],
) -> str:
    loop = config.loop
    rows = [
        ("Parameters", f"{flops.parameter_count(config):,}"),
        (
            "Layers",
            f"{config.prelude_layers} prelude, {config.core_layers} core, "
            f"{config.coda_layers} coda",
        ),
        ("Width", f"{config.width}"),
        ("Vocabulary", f"{config.vocab_size:,}"),
        ("Context", f"{config.context_length:,} tokens"),
        ("Mean loops in training", f"{loop.mean_loops:g}"),
    ]
    if sources:
        rows.append(("Training data", ", ".join(f"`{source}`" for source in sources)))
    if "tokens" in result:
        rows.append(("Training tokens", f"{result['tokens']:,}"))
    if "flops" in result:
        rows.append(("Training FLOPs", console.format_flops(result["flops"])))
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)])
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        "tags:\n- parcae\n- looped-transformer\n---",
        f"# {name}",
        "A looped language model: prelude → core, looped T times → coda. The number of loops is "
        "chosen when the model runs; more loops cost time and improve the prediction up to a point."
        if config.architecture == "looped"
        else "A Transformer language model, trained with parcae.",
        table,
    ]
    if losses:
        header = ["| loops | " + " | ".join(map(str, losses)) + " |"]
        header.append("|---|" + "---:|" * len(losses))
        header.append(
            "| held-out loss, nats per token | "
            + " | ".join(f"{loss:.4f}" for loss in losses.values())
            + " |"
        )
        parts += ["## Evaluation", "\n".join(header)]
        if len(losses) > 1:
            parts.append(f"![Held-out loss against loops]({FIGURE_FILE})")
    loops = f", num_loops={loop.nominal_loops}" if config.architecture == "looped" else ""
    parts += [
        "## Use",
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)\n'
        'inputs = tokenizer("Once", return_tensors="pt")\n'
        f"output = model.generate(**inputs, max_new_tokens=32{loops})\n"
        "print(tokenizer.decode(output[0], skip_special_tokens=True))\n```",
        "`trust_remote_code` runs the modelling file in this folder; with the package `parcae` "
        "installed, `import parcae` before makes it unnecessary.",
    ]
    return "\n\n".join(parts) + "\n"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(to_json(content), encoding="utf-8")
