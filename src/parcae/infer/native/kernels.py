"""Compile, load and call the C++ library in this folder.

The library is compiled when it is first needed and kept in the user's cache folder, under a name
made of the source, the compiler and the CPU. Without a compiler decoding runs through PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from array import array
from collections.abc import Iterable
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from parcae.files import atomic_path
from parcae.infer.quantise import Matrix

SOURCE = Path(__file__).with_name("pass.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
COMPILE_TIMEOUT = 120
"""Seconds."""
MIN_PARALLEL_PRODUCTS = 1 << 18
"""With fewer products of weights and tokens, one thread finishes before a second has started."""
MAX_TOKENS = 32
"""In passes of more tokens PyTorch's matrix products are faster."""


class KernelsUnavailable(RuntimeError):
    """Why the C++ library is not available."""


def address(data: Tensor | array | None) -> int:
    if data is None:
        return 0
    return data.buffer_info()[0] if isinstance(data, array) else data.data_ptr()


def int64_array(values: Iterable[int]) -> array:
    return array("q", values)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


# The structures of layer.h and pass.cpp, field by field. Whoever fills a structure must keep the
# tensors behind its addresses alive.


class MatrixFields(ctypes.Structure):
    _fields_ = (*_fields(c_void_p, "data scale"), *_fields(c_int64, "out in_"))

    @classmethod
    def of(cls, matrix: Matrix | None) -> MatrixFields:
        if matrix is None:
            return cls()
        return cls(address(matrix.stored), address(matrix.scale), *matrix.stored.shape)


class LayerFields(ctypes.Structure):
    _fields_ = (
        *_fields(MatrixFields, "inner outer fc proj"),
        *_fields(c_void_p, "norm_after_attention norm_after_mlp value_table"),
        *_fields(c_float, "norm_floor qk_floor score_scale"),
        *_fields(c_int32, "heads kv_heads head_dim gated_mlp"),
    )


class ModelFields(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "layers"),
        *_fields(c_int64, "prelude core coda width state_width context"),
        *_fields(c_void_p, "embedding outer_phases core_phases prelude_norm final_norm"),
        *_fields(c_float, "norm_floor"),
        *_fields(MatrixFields, "into transition"),
        *_fields(c_void_p, "decay"),
        *_fields(MatrixFields, "readout head"),
        *_fields(c_void_p, "unembedding"),
        *_fields(c_int64, "candidates"),
    )


class Kernels:
    """The functions of the library. KernelsUnavailable if it cannot be compiled."""

    def __init__(self) -> None:
        library = _load()
        if isinstance(library, KernelsUnavailable):
            raise library
        self._pass = library.parcae_pass
        self._pass.argtypes = (POINTER(ModelFields), c_void_p)
        self._pass.restype = None
        self._scratch = library.parcae_scratch
        self._scratch.argtypes = (POINTER(ModelFields), c_int64, c_int64)
        self._scratch.restype = c_int64
        self._multiply = library.parcae_multiply
        self._multiply.argtypes = (POINTER(MatrixFields), c_void_p, c_int64, c_void_p, c_int64)
        self._multiply.restype = None

    def run(self, model: ModelFields, fields: array) -> None:
        """Run a pass; `fields` are those of the struct `Pass`, in order."""
        self._pass(byref(model), address(fields))

    def scratch(self, model: ModelFields, tokens: int, threads: int) -> Tensor:
        """Working memory for passes of up to `tokens` tokens."""
        size = self._scratch(byref(model), tokens, threads)
        return torch.empty(size, dtype=torch.float32, device="cpu")

    def multiply(self, matrix: Matrix, x: Tensor) -> Tensor:
        """x W^T for a few tokens."""
        x, fields = x.contiguous(), MatrixFields.of(matrix)
        y = x.new_empty(len(x), fields.out)
        threads = thread_count(fields.out * fields.in_ * len(x))
        self._multiply(byref(fields), x.data_ptr(), len(x), y.data_ptr(), threads)
        return y


def thread_count(products: int) -> int:
    """How many threads to use for this many products of weights and tokens."""
    return 1 if products < MIN_PARALLEL_PRODUCTS else torch.get_num_threads()


@cache
def _load() -> ctypes.CDLL | KernelsUnavailable:
    """The library, compiled if necessary, or why it is not available."""
    if os.environ.get("PARCAE_NATIVE", "1") == "0":
        return KernelsUnavailable("PARCAE_NATIVE=0 turns them off")
    if _compiler() is None:
        return KernelsUnavailable("there is no C++ compiler (set CXX, or install g++)")
    try:
        path = _compiled()
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or compiled for another machine
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled()))
    except KernelsUnavailable as problem:
        return problem
    except (OSError, RuntimeError) as error:
        return KernelsUnavailable(f"the library cannot be stored in the cache folder ({error})")


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiled() -> Path:
    """The path of the library for this source, compiler and CPU; compiled if it does not exist."""
    compiler = _compiler()
    assert compiler is not None
    version = _run([compiler, "--version"])
    sources = (file.read_text() for file in sorted(SOURCE.parent.glob("*.[ch]*")))
    key = "\n".join((*sources, version, *FLAGS, _cpu()))
    path = cache_folder() / f"pass-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_path(path) as temporary:
                _compile(compiler, temporary)
        except OSError as error:
            raise KernelsUnavailable(f"{path} cannot be written ({error})") from None
    return path


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(target)]
    try:
        _run([*command, "-fopenmp"])
    except KernelsUnavailable:  # without OpenMP the library uses one thread
        _run(command)


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=True
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()[:3]
        raise KernelsUnavailable(f"{command[0]} failed: {' '.join(lines)}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} failed: {error}") from None
    return result.stdout


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "parcae"


def _cpu() -> str:
    """What -march=native depends on; different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    prefixes = ("flags", "model name", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))
