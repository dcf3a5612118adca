"""Train, study and run looped language models that are stable by construction.

    model = parcae.create("parcae-10m")             # any name in parcae.PRESETS
    logits = model(tokens, loops=8).logits         # the same weights, looped 8 times
    parcae.train("recipe.toml", out="runs/first")   # or `parcae train recipe.toml`
    model = parcae.load("runs/first")               # with its tokenizer: parcae.open_checkpoint
    parcae.evaluate("runs/first", loops=(1, 4, 8))  # or `parcae eval runs/first --loops 1,4,8`
    runs = parcae.sweep("recipe.toml", "runs/laws", flops=[1e12, 2e12], mean_loops=[1, 2, 4])
    laws = parcae.fit(runs.table())                 # scaling laws of a table of runs

A module is imported when one of its names is first used, so `import parcae` is cheap.

Packages: model, data, runs, training, infer, evaluation, laws, sweeps, experiments, report, hub,
serving, commands; the docstring of each lists its modules. Modules:

    config     model and loop configuration      presets    models by name
    schema     validation of settings: types, ranges, messages
    recipe     recipes: TOML files and flags to tables of settings; unknown keys
    registry   injections, samplers and optimisers by name; a user's files
    files      atomic writes, checksums, locks   tables     tables as Markdown, CSV, LaTeX
    console    output, progress, numbers         plotting   style of figures
    machine    memory, cores, signals, cache     device     auto, cpu, cuda, mps
    cli        the command `parcae`, also as     rng        random numbers by key
               `python -m parcae` (__main__)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from parcae.hub import register_when_imported

_PUBLIC = {
    "config": ("ConfigError", "Curriculum", "LoopConfig", "ModelConfig"),
    "evaluation.loop_trace": ("trace_loops",),
    "evaluation.results": ("EvaluationResult",),
    "evaluation.run": ("evaluate",),
    "experiments.reproduce": ("reproduce",),
    "files": ("FileError",),
    "hub.export": ("export",),
    "hub.import_model": ("import_model",),
    "infer.engine": ("Engine", "generate"),
    "infer.exit": ("register_exit_rule",),
    "infer.sequence": ("Completion",),
    "laws.fit": ("FitResult", "fit"),
    "laws.predict": ("Prediction", "predict"),
    "model": ("create",),
    "model.base": ("LanguageModel",),
    "model.depth": ("Depths",),
    "model.injection": ("Injection",),
    "model.store": ("save",),
    "presets": ("PRESETS", "preset"),
    "registry": (
        "import_file",
        "register_injection",
        "register_optimiser",
        "register_sampler",
    ),
    "report.comparison": ("compare",),
    "report.page": ("write_report",),
    "runs": ("Checkpoint", "TrainResult", "load", "open_checkpoint"),
    "serving.app": ("create_app",),
    "serving.server": ("serve",),
    "sweeps.run": ("SweepResult", "sweep"),
    "tables": ("format_table",),
    "training.plan": ("plan",),
    "training.run": ("train",),
    "training.settings": ("Recipe",),
}
"""The public names by module: what `__all__`, `dir(parcae)` and attribute access follow. The
imports below repeat it for type checkers; a test compares the two."""

if TYPE_CHECKING:
    from parcae.config import ConfigError as ConfigError
    from parcae.config import Curriculum as Curriculum
    from parcae.config import LoopConfig as LoopConfig
    from parcae.config import ModelConfig as ModelConfig
    from parcae.evaluation.loop_trace import trace_loops as trace_loops
    from parcae.evaluation.results import EvaluationResult as EvaluationResult
    from parcae.evaluation.run import evaluate as evaluate
    from parcae.experiments.reproduce import reproduce as reproduce
    from parcae.files import FileError as FileError
    from parcae.hub.export import export as export
    from parcae.hub.import_model import import_model as import_model
    from parcae.infer.engine import Engine as Engine
    from parcae.infer.engine import generate as generate
    from parcae.infer.exit import register_exit_rule as register_exit_rule
    from parcae.infer.sequence import Completion as Completion
    from parcae.laws.fit import FitResult as FitResult
    from parcae.laws.fit import fit as fit
    from parcae.laws.predict import Prediction as Prediction
    from parcae.laws.predict import predict as predict
    from parcae.model import create as create
    from parcae.model.base import LanguageModel as LanguageModel
    from parcae.model.depth import Depths as Depths
    from parcae.model.injection import Injection as Injection
    from parcae.model.store import save as save
    from parcae.presets import PRESETS as PRESETS
    from parcae.presets import preset as preset
    from parcae.registry import import_file as import_file
    from parcae.registry import register_injection as register_injection
    from parcae.registry import register_optimiser as register_optimiser
    from parcae.registry import register_sampler as register_sampler
    from parcae.report.comparison import compare as compare
    from parcae.report.page import write_report as write_report
    from parcae.runs import Checkpoint as Checkpoint
    from parcae.runs import TrainResult as TrainResult
    from parcae.runs import load as load
    from parcae.runs import open_checkpoint as open_checkpoint
    from parcae.serving.app import create_app as create_app
    from parcae.serving.server import serve as serve
    from parcae.sweeps.run import SweepResult as SweepResult
    from parcae.sweeps.run import sweep as sweep
    from parcae.tables import format_table as format_table
    from parcae.training.plan import plan as plan
    from parcae.training.run import train as train
    from parcae.training.settings import Recipe as Recipe

_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"parcae.{_MODULE_OF[name]}"), name)
    if name == "data":  # its names are lazy too
        return importlib.import_module("parcae.data")
    if name == "__version__":
        from importlib.metadata import version

        return version("parcae")
    raise AttributeError(f"module 'parcae' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)


register_when_imported()
