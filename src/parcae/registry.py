"""Parts that a recipe uses by name, and how to add some from outside the package.

    @parcae.register_injection("gated")
    class GatedInjection(parcae.Injection): ...

A built-in part is imported when it is first used, so that names can be checked without PyTorch.
`import_file` loads a user's file that registers parts; it is what `--import FILE` calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from parcae.schema import ConfigError, shorten, suggest

T = TypeVar("T")

IMPORT_VARIABLE = "PARCAE_IMPORT"
"""Environment variable with the files that were imported, so that child processes import them."""
IMPORT_OPTION = "--import FILE"


class Registry:
    """Parts of one kind by name."""

    def __init__(self, kind: str, builtin: Mapping[str, str], reserved: Sequence[str] = ()) -> None:
        """`builtin`: "module:attribute" by name. `reserved`: names in use without a part."""
        self.kind = kind
        self._builtin = dict(builtin)
        self._reserved = tuple(reserved)
        self._registered: dict[str, Any] = {}
        self._resolved: dict[str, Any] = {}
        self.on_change: list[Callable[[], None]] = []
        """Called after a name was registered, to forget what was computed from its part."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that may be used, built-in ones first."""
        return (*self._builtin, *self._reserved, *self._registered)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Any:
        if name in self._registered:
            return self._registered[name]
        if name not in self._resolved:
            module, attribute = self._builtin[name].split(":")
            self._resolved[name] = getattr(importlib.import_module(module), attribute)
        return self._resolved[name]

    def check(self, name: object, key: str) -> None:
        """Raise `ConfigError` about the setting `key` unless the name is known."""
        if name not in self:
            known = f"Known: {', '.join(self.names)}."
            hint = suggest(str(name), self.names)
            hint = known if hint.startswith("Known") else f"{hint} {known}"
            raise ConfigError(
                f"{key}: {shorten(name)} is not a known {self.kind}. {hint} "
                f"If a file of yours registers it, name that file with {IMPORT_OPTION}."
            )

    def register(self, name: str, part: object = None) -> Any:
        """Add a part, or return a decorator that does. A name can be registered again, as when a
        notebook's cell is run twice; built-in names cannot be replaced."""
        if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
            raise ConfigError(
                f"{name!r}: not a valid {self.kind} name. Start with a letter; then use "
                "letters, digits, '-', '_' and '.'."
            )
        if name in self._builtin or name in self._reserved:
            raise ConfigError(f"{name}: a built-in {self.kind} has this name. Choose another.")

        def add(part: T) -> T:
            self._registered[name] = part
            for forget in self.on_change:
                forget()
            return part

        return add if part is None else add(part)


INJECTIONS = Registry(
    "injection",
    {
        "diagonal": "parcae.model.injection:DiagonalInjection",
        "concatenation": "parcae.model.injection:ConcatenationInjection",
        "addition": "parcae.model.injection:AdditionInjection",
    },
    reserved=("none",),
)
SAMPLERS = Registry(
    "sampler",
    {
        "poisson": "parcae.model.depth:poisson",
        "poisson-full": "parcae.model.depth:poisson_full",
        "poisson-fill": "parcae.model.depth:poisson_fill",
        "lognormal-fill": "parcae.model.depth:lognormal_fill",
        "release-per-batch": "parcae.model.depth:release_per_batch",
        "fixed": "parcae.model.depth:fixed",
    },
)
OPTIMISERS = Registry(
    "optimiser",
    {
        "adamw": "parcae.training.optim:adamw",
        "adamw-atan2": "parcae.training.optim:adamw_atan2",
    },
    reserved=("muon-adamw",),  # two optimisers, each for its own parameters
)


def register_injection(name: str, cls: type | None = None) -> Any:
    """Add an injection, a subclass of `parcae.Injection`, for `model.injection = "name"`.

    Also a decorator: `@register_injection("name")`.
    """
    return INJECTIONS.register(name, cls)


def register_sampler(name: str, function: Callable[..., Any] | None = None) -> Any:
    """Add a sampler of depths for `model.loop.sampler = "name"`; also a decorator.

    `function(loop, rows, generator, step)` returns `parcae.Depths` for `rows` sequences, drawn from
    the `torch.Generator`; `loop` is the `LoopConfig`, `step` the optimiser step.
    """
    return SAMPLERS.register(name, function)


def register_optimiser(name: str, factory: Callable[..., Any] | None = None) -> Any:
    """Add an optimiser for `optimiser.kind = "name"`; also a decorator.

    `factory(groups, config)` returns a `torch.optim.Optimizer`. `groups` are parameter groups with
    their weight decay, `config` is the table `[optimiser]`. The schedule multiplies the learning
    rate that each group has when the factory returns.
    """
    return OPTIMISERS.register(name, factory)


_imported: dict[str, None] = {}  # in order


def import_file(path: str | Path) -> None:
    """Run a Python file that registers parts, once per process.

    Its path goes into the environment variable PARCAE_IMPORT, from which `parcae` commands started
    by this process, such as the runs of a sweep, import it too.
    """
    full = Path(path).resolve()
    if str(full) in _imported:
        return
    name = re.sub(r"\W", "_", full.stem)
    spec = importlib.util.spec_from_file_location(f"parcae_import_{name}", full)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import {path}: not a Python file. Name a file that ends in .py.")
    if not full.is_file():
        raise ConfigError(f"--import {path}: no such file. Check the path.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(full.parent) not in sys.path:
        sys.path.append(str(full.parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ConfigError(f"--import {path}: {_where(error, full)}{error}") from error
    _imported[str(full)] = None
    others = [p for p in os.environ.get(IMPORT_VARIABLE, "").split(os.pathsep) if p]
    if str(full) not in others:
        os.environ[IMPORT_VARIABLE] = os.pathsep.join([*others, str(full)])


def imported_files() -> list[str]:
    """The files that were imported in this process, in order."""
    return list(_imported)


def import_options(paths: Iterable[str]) -> str:
    """What a command needs to import these files: ` --import FILE` for each of them."""
    return "".join(f" --import {shlex.quote(path)}" for path in paths)


def import_from_environment() -> None:
    """Import the files that a parent process has imported."""
    for path in os.environ.get(IMPORT_VARIABLE, "").split(os.pathsep):
        if path:
            import_file(path)


def _where(error: Exception, path: Path) -> str:
    """The line of the file at which it failed, and the kind of error."""
    if isinstance(error, ConfigError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"line {line}: {type(error).__name__}: " if line else f"{type(error).__name__}: "
