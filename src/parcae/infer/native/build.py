"""Compile `pass.cpp` when it is first needed, and keep the result for this kind of CPU.

Nothing is installed: the library lies in the user's cache folder under a name made of the source,
the compiler and the CPU. Where there is no compiler, decoding works without it, only slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from parcae.files import atomic_path

SOURCE = Path(__file__).with_name("pass.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
SECONDS = 120


class NoKernels(RuntimeError):
    """Why the C++ layers cannot be had here."""


def library() -> ctypes.CDLL:
    """Built if need be, and loaded. The same object, or the same error, from then on."""
    found = _library()
    if isinstance(found, NoKernels):
        raise found
    return found


@cache
def _library() -> ctypes.CDLL | NoKernels:
    if os.environ.get("PARCAE_NATIVE", "1") == "0":
        return NoKernels("PARCAE_NATIVE=0 turns them off")
    if _compiler() is None:
        return NoKernels("there is no C++ compiler (set CXX, or install g++)")
    try:
        path = _built()
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or for another machine
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_built()))
    except NoKernels as problem:
        return problem
    except (OSError, RuntimeError) as error:
        return NoKernels(f"the library cannot be kept in the cache folder ({error})")


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _built() -> Path:
    compiler = _compiler()
    assert compiler is not None
    version = _run([compiler, "--version"])
    sources = (file.read_text() for file in sorted(SOURCE.parent.glob("*.[ch]*")))
    key = "\n".join((*sources, version, *FLAGS, _processor()))
    name = f"pass-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    path = cache_folder() / name
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_path(path) as temporary:
                _compile(compiler, temporary)
        except OSError as error:
            raise NoKernels(f"{path} cannot be written ({error})") from None
    return path


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(target)]
    try:
        _run([*command, "-fopenmp"])
    except NoKernels:  # a compiler without OpenMP still makes a library for one thread
        _run(command)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        shown = (error.stderr or "").strip().splitlines()[:3]
        raise NoKernels(f"{command[0]} failed: {' '.join(shown)}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} failed: {error}") from None
    return done.stdout


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "parcae"


def _processor() -> str:
    """What -march=native looks at; a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("flags", "model name", "Features"))})
    )
