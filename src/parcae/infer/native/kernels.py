"""Compile, load and call the C++ library in this folder.

The library is compiled when it is first needed and kept in the user's cache folder, under a name
made of the source, the compiler and the CPU, and of the checksum of its own content: a damaged one
is compiled again. A cache folder that other users may write to is not used. Without a compiler
decoding runs through PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from array import array
from collections.abc import Iterable
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from parcae.files import atomic_path, sha256
from parcae.infer.native.choice import Choices
from parcae.infer.quantise import CACHE_LINE, Matrix
from parcae.machine import cache_folder, is_private

SOURCE = Path(__file__).with_name("pass.cpp")
FLAGS = (
    *("-O3", "-fno-math-errno", "-ffp-contract=off"),
    *("-std=c++20", "-shared", "-fPIC", "-pthread"),
)
"""PARCAE_CXXFLAGS adds to them: -march=x86-64-v3, -fsanitize=address, -fno-openmp."""
THIS_CPU = ("-march=native", "-mcpu=native", "-O3")
"""The first of these that the compiler accepts: clang for ARM before version 15 wants the second;
without either the kernels are those of every CPU of the architecture."""
THREADS = ("-fopenmp", "-pthread")
"""Likewise; without OpenMP the library uses the threads of the standard library."""
COMPILE_TIMEOUT = 120
"""Seconds."""
MIN_PARALLEL_PRODUCTS = 1 << 18
"""With fewer products of weights and tokens, one thread finishes before a second has started."""
MAX_TOKENS = 128
"""In passes of more tokens, which are prompts, PyTorch's attention is faster."""


class KernelsUnavailable(RuntimeError):
    """Why the C++ library is not available."""


class CompilationTimeout(KernelsUnavailable):
    """The compiler took longer than COMPILE_TIMEOUT."""


class UnsafeCache(KernelsUnavailable):
    """Another user could have put a library into the cache folder."""


def address(data: Tensor | array | None) -> int:
    if data is None:
        return 0
    return data.buffer_info()[0] if isinstance(data, array) else data.data_ptr()


def int64_array(values: Iterable[int]) -> array:
    return array("q", values)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


# The structures of matrix.h, layer.h and pass.cpp, by the same names; `_check_structures` compares
# them when the library is loaded. Who fills a structure must keep the tensors behind its addresses.


class MatrixFields(ctypes.Structure):
    _fields_ = (*_fields(c_void_p, "panels scale"), *_fields(c_int64, "out in"))


class LayerFields(ctypes.Structure):
    _fields_ = (
        *_fields(MatrixFields, "inner outer fc proj"),
        *_fields(c_void_p, "norm_after_attention norm_after_mlp value_table"),
        *_fields(c_float, "norm_floor qk_floor score_scale"),
        *_fields(c_int32, "heads kv_heads head_dim"),
        *_fields(c_int64, "gated_mlp"),
    )


class ModelFields(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "layers"),
        *_fields(c_int64, "prelude core coda width state_width context"),
        *_fields(c_void_p, "embedding outer_phases core_phases prelude_norm final_norm"),
        *_fields(c_double, "norm_floor"),
        *_fields(MatrixFields, "into transition"),
        *_fields(c_void_p, "decay"),
        *_fields(MatrixFields, "readout head"),
        *_fields(c_void_p, "unembedding"),
        *_fields(c_int64, "candidates"),
    )


class PassFields(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "tokens"),
        *_fields(c_void_p, "ids rows positions outer core"),
        *_fields(c_int64, "cache_itemsize outer_layer outer_row core_layer core_row loops"),
        *_fields(c_void_p, "slots limits settled min_change"),
        *_fields(c_int64, "watched"),
        *_fields(c_void_p, "order ran active state"),
        *_fields(c_int64, "predicted"),
        *_fields(c_void_p, "predict logits scratch"),
        *_fields(c_int64, "threads"),
    )


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "Matrix": MatrixFields,
    "Layer": LayerFields,
    "Model": ModelFields,
    "Pass": PassFields,
}


def describe_structure(name: str, structure: type[ctypes.Structure]) -> str:
    """Size, and fields with offsets and sizes, in the form that `parcae_structures` returns."""
    fields = {field[0]: getattr(structure, field[0]) for field in structure._fields_}
    listed = " ".join(f"{key}:{field.offset}+{field.size}" for key, field in fields.items())
    size = ctypes.sizeof(structure)
    unlisted = size - sum(field.size for field in fields.values())
    return f"{name} {size} {listed} unlisted:{unlisted}"


def _check_structures(library: ctypes.CDLL) -> None:
    """RuntimeError if Python and C++ disagree about a structure."""
    library.parcae_structures.restype = c_char_p
    compiled = library.parcae_structures().decode().splitlines()
    ours = [describe_structure(*item) for item in STRUCTURES.items()]
    for here, there in zip(ours, compiled, strict=True):
        if here != there:
            raise RuntimeError(
                f"infer/native: a structure differs between Python and C++.\n"
                f"kernels.py: {here}\nC++:        {there}"
            )


class Kernels:
    """The functions of the library. KernelsUnavailable if it cannot be compiled."""

    def __init__(self, measured: bool = False) -> None:
        """`measured`: run only those passes in C++ that take less time than in PyTorch. With the
        environment variable PARCAE_NATIVE=1 all run in C++."""
        self.measured = measured and os.environ.get("PARCAE_NATIVE") != "1"
        library = _load()
        if isinstance(library, KernelsUnavailable):
            raise library
        _check_structures(library)
        self._pass = library.parcae_pass
        self._pass.argtypes = (POINTER(ModelFields), POINTER(PassFields))
        self._pass.restype = None
        self._scratch = library.parcae_scratch
        self._scratch.argtypes = (POINTER(ModelFields), c_int64, c_int64)
        self._scratch.restype = c_int64
        self._packed_bytes = library.parcae_packed_bytes
        self._packed_bytes.argtypes = (c_int64, c_int64, c_int64)
        self._packed_bytes.restype = c_int64
        self._pack = library.parcae_pack
        self._pack.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p)
        self._pack.restype = None
        self._gemm = library.parcae_gemm
        self._gemm.argtypes = (
            *(POINTER(MatrixFields), c_void_p, c_int64),
            *(c_void_p, c_void_p, c_void_p, c_int64),
        )
        self._gemm.restype = None
        self._name = Path(library._name).name
        library.parcae_target.restype = c_char_p
        self.target: str = library.parcae_target().decode()
        """The vector instructions and the kind of threads the library was compiled for."""

    def choices(self, shape: str) -> Choices:
        """What was found to be faster on this machine for models of a shape."""
        machine = (_cpu(), self._name, torch.__version__, torch.get_num_threads())
        return Choices("\n".join(map(str, machine)), shape, cache_folder())

    def run(self, model: ModelFields, fields: PassFields) -> None:
        """Run a pass."""
        self._pass(byref(model), byref(fields))

    def scratch(self, model: ModelFields, tokens: int, threads: int) -> Tensor:
        """Working memory for passes of up to `tokens` tokens."""
        size = self._scratch(byref(model), tokens, threads)
        return torch.empty(size, dtype=torch.float32, device="cpu")

    def fields(self, matrix: Matrix | None) -> MatrixFields:
        """A matrix as C++ reads it. Its weights are put in the order of the kernels, once."""
        if matrix is None:
            return MatrixFields()
        if matrix.panels is None:
            matrix.panels = self._panels(matrix.stored)
        return MatrixFields(address(matrix.panels), address(matrix.scale), *matrix.stored.shape)

    def _panels(self, weight: Tensor) -> Tensor:
        shape = (*weight.shape, weight.dtype == torch.int8)
        size = self._packed_bytes(*shape)
        padded = torch.empty(size + CACHE_LINE, dtype=torch.int8, device="cpu")
        panels = padded[-padded.data_ptr() % CACHE_LINE :][:size]
        self._pack(weight.data_ptr(), *shape, panels.data_ptr())
        return panels

    def gemm(self, matrix: Matrix, x: Tensor) -> Tensor:
        """x W^T."""
        x, fields = x.contiguous(), self.fields(matrix)
        out, width = matrix.stored.shape
        y = x.new_empty(len(x), out)
        quantised = torch.empty(len(x), width + 3, dtype=torch.int8, device="cpu")
        scales = torch.empty(len(x), dtype=torch.float32, device="cpu")
        threads = thread_count(out * width * len(x))
        buffers = map(address, (quantised, scales, y))
        self._gemm(byref(fields), x.data_ptr(), len(x), *buffers, threads)
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
        chosen = os.environ.get("CXX")
        problem = f"CXX={chosen} is not a program" if chosen else "there is no C++ compiler"
        return KernelsUnavailable(f"{problem} (set CXX, or install g++)")
    try:
        path = _compiled()
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or compiled for another machine
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled()))
    except UnsafeCache as problem:
        warnings.warn(f"decoding runs through PyTorch: {problem}", stacklevel=2)
        return problem
    except KernelsUnavailable as problem:
        return problem
    except (OSError, RuntimeError) as error:
        return KernelsUnavailable(f"the library cannot be stored in the cache folder ({error})")


def _compiler() -> list[str] | None:
    """The command of the compiler; CXX may have arguments, as in "ccache g++"."""
    chosen = os.environ.get("CXX", "").strip()
    commands = [["g++"], ["clang++"], ["c++"]]
    if chosen:
        commands = [[chosen]]
        with contextlib.suppress(ValueError):  # a quotation that does not end
            commands.append(shlex.split(chosen))
    return next((command for command in commands if shutil.which(command[0])), None)


def _compiled() -> Path:
    """The path of the library for this source, compiler and CPU; compiled if it does not exist."""
    compiler = _compiler()
    assert compiler is not None
    version = _run([*compiler, "--version"])
    sources = (file.read_text() for file in sorted(SOURCE.parent.glob("*.[ch]*")))
    key = "\n".join((*sources, version, *flags(), _cpu()))
    folder, name = cache_folder(), f"pass-{_digest(key)}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder)
        for path in folder.glob(f"{name}-*.so"):
            _check_private(path)
            if path.stem == f"{name}-{sha256(path)}":
                return path
            path.unlink()  # to load a truncated library would end the process
        with tempfile.TemporaryDirectory(prefix="parcae-") as temporary:
            library = Path(temporary) / "pass.so"
            _compile(compiler, library)
            path = folder / f"{name}-{sha256(library)}.so"
            with atomic_path(path) as copy:
                shutil.copyfile(library, copy)
                copy.chmod(0o700)  # whatever the umask
    except OSError as error:
        raise KernelsUnavailable(f"{folder} cannot be used ({error})") from None
    return path


def _check_private(path: Path) -> None:
    if not is_private(path):
        raise UnsafeCache(
            f"{path} belongs to another user, or others may write to it. "
            "Remove it, or set XDG_CACHE_HOME to a folder of your own"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compile(compiler: list[str], target: Path) -> None:
    arguments = [*flags(), str(SOURCE), "-o", str(target)]
    failures: list[KernelsUnavailable] = []
    for options in itertools.product(THIS_CPU, THREADS):
        try:
            _run([*compiler, *options, *arguments])
            return
        except CompilationTimeout:  # says nothing about the options: the machine is busy
            raise
        except KernelsUnavailable as failure:
            failures.append(failure)
    raise failures[-1]  # the others may be about the options


def flags() -> list[str]:
    return [*FLAGS, *shlex.split(os.environ.get("PARCAE_CXXFLAGS", ""))]


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(  # noqa: S603 (the user's own compiler)
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=COMPILE_TIMEOUT,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()[:3]
        reason = " ".join(lines) or f"exit status {error.returncode}"
        raise KernelsUnavailable(f"{command[0]} failed: {reason}") from None
    except subprocess.TimeoutExpired:
        raise CompilationTimeout(
            f"{command[0]} took longer than {COMPILE_TIMEOUT} seconds"
        ) from None
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]} failed: {error}") from None
    return result.stdout


def _cpu() -> str:
    """What -march=native depends on; different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # macOS names all its CPUs "arm"; sysctl tells them apart
        with contextlib.suppress(KernelsUnavailable):
            return _run(["sysctl", "-n", "machdep.cpu.brand_string"])
        return platform.processor() + platform.machine()
    prefixes = ("flags", "model name", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))
