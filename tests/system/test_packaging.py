"""What an installation needs and what it gives."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import parcae

ROOT = Path(__file__).parents[2]
PACKAGE = Path(parcae.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT = {"cycler", "pydantic-core", "starlette"}
"""Parts of matplotlib, pydantic and fastapi."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", line)[0].replace("_", "-") for line in requirements}


def imports() -> set[str]:
    """Distributions that the package imports."""
    modules: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    owners = packages_distributions()
    foreign = modules - sys.stdlib_module_names - {"parcae"}
    return {owners.get(name, [name])[0].lower().replace("_", "-") for name in foreign}


def test_types_are_given_to_users_too():
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.slow
def test_each_dependency_is_imported_and_each_import_is_a_dependency():
    extras = PROJECT["optional-dependencies"]
    optional = [line for extra in extras for line in extras[extra] if extra != "dev"]
    needed, imported = names(PROJECT["dependencies"]), imports()
    assert needed - imported == set()
    assert imported - BROUGHT - needed - names(optional) == set()


def test_the_workflow_tries_the_ends_of_what_is_supported():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    every = (matrix["python"][0], matrix["torch"][0])
    tried = {every, *((job["python"], job["torch"]) for job in matrix["include"])}
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    tested = re.search(r"# (\S+) and (\S+) are tested", (ROOT / "pyproject.toml").read_text())
    assert tested
    assert {(pythons[0], tested[1]), (pythons[-1], tested[2])} <= tried
    assert f"TORCH  ?= torch=={tested[1]}\n" in (ROOT / "Makefile").read_text()
    [torch] = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    low, high = re.findall(r"\d+\.(\d+)", torch)
    assert (tested[1], tested[2]) == (f"2.{low}.0", f"2.{int(high) - 1}.0")
