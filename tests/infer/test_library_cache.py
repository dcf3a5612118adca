"""The cached C++ library: damaged ones are compiled again, and those of others are not loaded."""

from __future__ import annotations

import os
import subprocess

import pytest

from conftest import needs_compiler, tiny
from parcae.infer.engine import Engine
from parcae.infer.native import kernels
from parcae.model import create

COMPILER = """#!/bin/sh
case "$1" in --version) printf 'compiler \\377 1.0\\n';; *) exec {compiler} "$@";; esac
"""

pytestmark = needs_compiler


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, with a compiler that only copies a small library."""
    source = tmp_path / "pass.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(kernels, "SOURCE", source)
    folder = tmp_path / "cache"
    monkeypatch.setattr(kernels, "cache_folder", lambda: folder)
    kernels._load.cache_clear()
    yield folder
    kernels._load.cache_clear()


@pytest.mark.slow
def test_a_truncated_library_is_compiled_again(cache):
    library = kernels._compiled()
    whole = library.read_bytes()
    assert kernels._compiled() == library
    library.write_bytes(whole[:4096])
    again = kernels._compiled()
    assert again.read_bytes()[:4] == whole[:4]
    assert len(again.read_bytes()) > 4096
    assert kernels._load().answer() == 42


@pytest.mark.parametrize("writable", ["folder", "library"])
def test_a_library_that_others_may_write_is_not_loaded(cache, writable):
    library = kernels._compiled()
    (cache if writable == "folder" else library).chmod(0o777)
    with pytest.warns(UserWarning, match="decoding runs through PyTorch.*others may write"):
        assert isinstance(kernels._load(), kernels.UnsafeCache)
    engine = Engine(create(tiny()))
    assert len(engine.generate([5, 3], max_new_tokens=2, loops=2).tokens) == 2


def test_a_library_of_another_user_is_not_loaded(cache, monkeypatch):
    kernels._compiled()
    if os.getuid() == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert isinstance(kernels._load(), kernels.UnsafeCache)


def test_a_compiler_may_have_arguments_but_has_to_exist(cache, monkeypatch):
    monkeypatch.setenv("CXX", "env LANG=C g++")
    assert kernels._load().answer() == 42
    for wrong in ("nowhere/g++", "g++ 'not ended"):
        kernels._load.cache_clear()
        monkeypatch.setenv("CXX", wrong)
        assert f"CXX={wrong} is not a program" in str(kernels._load())
    monkeypatch.setenv("CXX", " ")
    assert kernels._compiler() is not None


def test_the_version_of_a_compiler_need_not_be_utf8(cache, tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(compiler=" ".join(kernels._compiler())))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert kernels._load().answer() == 42


def test_a_slow_compiler_is_no_reason_to_give_up_openmp(cache, monkeypatch):
    """A library without it would be kept, and be slower for good."""
    calls = []

    def run(command, **options):
        calls.append(command)
        if "--version" not in command:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0, "compiler 1.0")

    monkeypatch.setattr(subprocess, "run", run)
    problem = kernels._load()
    assert isinstance(problem, kernels.CompilationTimeout)
    assert "took longer than 120 seconds" in str(problem)
    assert [command[1:3] for command in calls] == [["--version"], ["-march=native", "-fopenmp"]]


@pytest.mark.parametrize(
    ("refused", "used"),
    [
        ("-fopenmp", ["-march=native", "-pthread"]),
        ("-march=native", ["-mcpu=native", "-fopenmp"]),  # as clang 14 does on ARM
        ("*native", ["-O3", "-fopenmp"]),
    ],
)
def test_options_that_a_compiler_refuses_are_left_out(cache, tmp_path, monkeypatch, refused, used):
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(
        f"""#!/bin/sh
for option in "$@"; do
  case "$option" in {refused}) echo "unsupported: $option" >&2; exit 1;; esac
done
echo "$1 $2" >> {log}
case "$1" in -mcpu=*) shift;; esac  # which means something else on x86-64
exec {" ".join(kernels._compiler())} "$@"
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert kernels._load().answer() == 42
    assert log.read_text().splitlines()[-1].split() == used
