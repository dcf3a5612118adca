"""The modelling files that exported and saved folders have, for `trust_remote_code=True`.

They are made from the sources of this package: what `modeling_parcae.py` imports from `parcae` is
copied into it, definition by definition, so that it needs torch and transformers only.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from parcae.hub.configuration_parcae import ParcaeConfig

HEADER = "# Made from the sources of parcae {version} (MIT licence) by `parcae export`.\n"
FILES = ("configuration_parcae.py", "modeling_parcae.py")
AUTO_MAP = {
    "AutoConfig": "configuration_parcae.ParcaeConfig",
    "AutoModel": "modeling_parcae.ParcaeModel",
    "AutoModelForCausalLM": "modeling_parcae.ParcaeForCausalLM",
}


def save_code(config: ParcaeConfig, folder: str | PathLike[str]) -> None:
    """Write the files into a folder, and into `config` where the Auto classes find them."""
    config.auto_map = dict(AUTO_MAP)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_code(Path(folder))


def write_code(folder: Path) -> None:
    for name, text in remote_code().items():
        (folder / name).write_text(text, encoding="utf-8")


@cache
def remote_code() -> dict[str, str]:
    """File names and contents."""
    header = HEADER.format(version=version("parcae"))
    folder = Path(__file__).parent
    configuration, modeling = (folder / name for name in FILES)
    return {
        configuration.name: header + configuration.read_text(encoding="utf-8"),
        modeling.name: header + _inline(modeling.read_text(encoding="utf-8")),
    }


class Source(NamedTuple):
    """A module's text, and where its names come from."""

    lines: list[str]
    definitions: dict[str, ast.stmt]
    imports: dict[str, ast.ImportFrom | ast.Import]

    def text(self, node: ast.stmt) -> str:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)])
        return "".join(self.lines[first - 1 : node.end_lineno])


def _inline(text: str) -> str:
    """`text` with its imports from `parcae` replaced by the definitions they refer to."""
    source = _parse(text)
    modules: dict[str, None] = {}
    names: dict[str, dict[str, None]] = {}
    definitions: dict[tuple[str, str], str] = {}
    origins: dict[str, str] = {}

    def add(module: str, name: str) -> None:
        """A definition, after those it uses."""
        if origins.setdefault(name, module) != module:
            raise RuntimeError(f"{name} is defined in {origins[name]} and in {module}")
        if (module, name) in definitions:
            return
        definitions[module, name] = ""  # being added: definitions may refer to each other
        origin = _read(module)
        for used in _names_used(origin.definitions[name]):
            if used in origin.definitions:
                add(module, used)
            elif used in origin.imports:
                add_import(origin.imports[used], used)
        del definitions[module, name]
        definitions[module, name] = origin.text(origin.definitions[name])

    def add_import(statement: ast.ImportFrom | ast.Import, name: str) -> None:
        alias = next(a for a in statement.names if (a.asname or a.name) == name)
        if isinstance(statement, ast.Import):
            modules[ast.unparse(statement)] = None
        elif (statement.module or "").startswith("parcae."):
            add(statement.module or "", alias.name)
        else:
            module = "." * statement.level + (statement.module or "")
            names.setdefault(module, {})[ast.unparse(alias)] = None

    for name, statement in source.imports.items():
        add_import(statement, name)
    lines = {m: f"from {m} import {', '.join(sorted(imported))}" for m, imported in names.items()}
    future, others = [lines.pop("__future__")], lines.values()
    body = ast.parse(text).body
    last_import = max(node.end_lineno or 0 for node in body if _is_import(node))
    parts = [
        "".join(source.lines[: body[0].end_lineno]),  # the docstring
        "\n".join([*future, *modules, *others]) + "\n",
        *definitions.values(),
        "".join(source.lines[last_import:]).lstrip("\n"),
    ]
    return "\n\n".join(parts)


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


@cache
def _read(module: str) -> Source:
    return _parse(inspect.getsource(importlib.import_module(module)))


def _parse(text: str) -> Source:
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, ast.ImportFrom | ast.Import] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions.update({t.id: node for t in targets if isinstance(t, ast.Name)})
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.update({alias.asname or alias.name: node for alias in node.names})
    return Source(text.splitlines(keepends=True), definitions, imports)


def _names_used(node: ast.AST) -> list[str]:
    """Names that a definition reads when it runs; annotations are not evaluated."""
    used: dict[str, None] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            used[node.id] = None
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(node)
    return list(used)
