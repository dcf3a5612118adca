"""The public names resolve, are documented, and cost nothing before they are used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

import parcae


@pytest.mark.parametrize("name", parcae.__all__)
def test_every_public_name_resolves_and_has_a_docstring(name):
    value = getattr(parcae, name)
    if name == "PRESETS":
        return
    assert value.__module__.startswith("parcae.")
    doc = value.__doc__ or ""
    assert len(doc) > 20
    assert not doc.startswith(f"{name}("), "the docstring that dataclasses write"


def test_type_checkers_see_the_same_names():
    tree = ast.parse(inspect.getsource(parcae))
    block = next(n for n in tree.body if isinstance(n, ast.If) and n.test.id == "TYPE_CHECKING")
    imported = {
        (statement.module.removeprefix("parcae."), alias.name)
        for statement in block.body
        for alias in statement.names
        if alias.name == alias.asname
    }
    assert imported == {(m, name) for m, names in parcae._PUBLIC.items() for name in names}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'creat'"):
        parcae.creat
    assert set(dir(parcae)) == set(parcae.__all__)


def test_importing_the_package_imports_nothing_heavy():
    script = (
        "import sys, parcae\n"
        "parcae.PRESETS, parcae.LoopConfig(), parcae.register_injection\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.slow
def test_the_version_and_the_data_package_need_no_import_of_their_own():
    script = "import parcae; print(parcae.__version__, parcae.data.prepare.__name__)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    assert printed.split() == [version("parcae"), "prepare"]
