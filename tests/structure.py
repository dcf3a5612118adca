"""The import graph and the names of the package, read from its source without importing it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "parcae"

Graph = Mapping[str, frozenset[str]]


@cache
def modules() -> Mapping[str, tuple[Path, ast.Module]]:
    """Path and syntax tree of every module, by its dotted name; a package stands for its
    `__init__`."""
    found = {}
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text(encoding="utf-8")))
    return found


@cache
def imports() -> Graph:
    """What each module imports, inside functions too; for type checkers only does not count."""
    return {name: frozenset(_imported(tree)) - {name} for name, (_, tree) in modules().items()}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in _without_type_checking(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            of_modules = [name for name in inner if name in modules()]
            yield from of_modules
            if node.module in modules() and len(of_modules) < len(node.names):
                yield node.module


def _without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _without_type_checking(child)


def closure(module: str) -> set[str]:
    """The module and all it imports, directly or not, with the packages they are in."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or name not in modules():
            continue
        found.add(name)
        waiting += imports()[name]
        waiting.append(name.rpartition(".")[0])
    return found - {PACKAGE}


def lines(names: set[str]) -> int:
    return sum(len(modules()[name][0].read_text(encoding="utf-8").splitlines()) for name in names)


def cycles() -> list[set[str]]:
    """Groups of modules that import each other, directly or not."""
    reached = {name: _reachable(name) for name in modules()}
    groups = []
    for name in modules():
        group = {other for other in reached[name] if name in reached[other]}
        if len(group) > 1 and group not in groups:
            groups.append(group)
    return groups


def _reachable(module: str) -> set[str]:
    found: set[str] = set()
    waiting = list(imports()[module])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports()[name]
    return found


def repeated_classes() -> set[str]:
    """Names of classes that more than one module defines."""
    names = Counter(
        node.name
        for _, tree in modules().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {name for name, count in names.items() if count > 1}


def option_calls() -> int:
    """Options of commands that are written out, not generated from settings."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        for _, tree in modules().values()
        for node in ast.walk(tree)
    )
