"""Hugging Face: looped models in transformers, exported and imported folders.

`import parcae` is enough for `AutoModelForCausalLM.from_pretrained(FOLDER)` to read what
`parcae export` wrote; transformers itself is imported only by those who use it.

configuration_parcae, modeling_parcae   the configuration and the model in transformers;
early_exit, initial_values, loops       parts of the model
export         `parcae.export`: a model as a folder for transformers
import_model   `parcae.import_model`: a published model as a model folder (the formats are in
               model.release_format and model.hf_format)
remote_code    the modelling files that an exported folder contains

The formats of weights are in parcae.model: hf_format, and release_format for the reference release.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTO_MODULE = "transformers.models.auto.modeling_auto"
MODELING = "parcae.hub.modeling_parcae"


def register() -> None:
    """Let `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` read the model type "parcae"."""
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    from parcae.hub.configuration_parcae import ParcaeConfig
    from parcae.hub.modeling_parcae import ParcaeForCausalLM, ParcaeModel

    AutoConfig.register(ParcaeConfig.model_type, ParcaeConfig, exist_ok=True)
    AutoModel.register(ParcaeConfig, ParcaeModel, exist_ok=True)
    AutoModelForCausalLM.register(ParcaeConfig, ParcaeForCausalLM, exist_ok=True)


def register_when_imported() -> None:
    """Call `register` now if transformers' Auto classes are imported, else when they are."""
    if AUTO_MODULE in sys.modules:
        register()
    elif not any(isinstance(finder, _AutoFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoFinder())


class _AutoFinder(MetaPathFinder):
    """Finds two modules as usual, with a loader that calls `register` when both can be used."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in (AUTO_MODULE, MODELING):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        begun = MODELING in sys.modules and module.__name__ == AUTO_MODULE
        self.loader.exec_module(module)
        if not begun:  # else MODELING imports AUTO_MODULE, and registers at its end
            register()
