"""The docstring of each package lists its modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = sorted(path.parent for path in (SOURCE / "parcae").rglob("__init__.py"))


def parts_of(package: Path) -> set[str]:
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    return modules | {path.parent.name for path in package.glob("*/__init__.py")}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_docstring_of_a_package_names_its_modules(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    assert parts_of(package) - set(re.findall(r"\w+", text or "")) == set()


def test_the_readme_names_every_package_and_module_of_the_root():
    tree = (SOURCE.parent / "README.md").read_text(encoding="utf-8").split("src/parcae/\n")[1]
    tree = tree.split("\nrecipes/")[0]
    for part in parts_of(SOURCE / "parcae") - {"__main__"}:
        assert re.search(rf"\b{part}(?:/|\.py)", tree), part
