"""The C++ kernels compiled for other CPUs, against sums in double precision, and under sanitizers.

x86-64-v4 is compiled but runs only where the CPU has AVX-512. The ARM kernels need a cross compiler
and an emulator (Debian: g++-aarch64-linux-gnu, qemu-user).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from parcae.infer.native import kernels

CHECK = Path(__file__).with_name("kernels_check.cpp")
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"


def compiled(compiler: str, flags: str, target: Path) -> Path:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, *flags.split(), "-std=c++20", "-O2", "-ffp-contract=off", "-pthread"]
    folder = f"-I{kernels.SOURCE.parent}"
    subprocess.run([*command, folder, str(CHECK), "-o", str(target)], check=True)
    return target


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64")
@pytest.mark.parametrize(
    ("flags", "needs", "expected"),
    [
        ("-march=x86-64", "sse2", "128-bit vectors"),
        (f"-march=native -fopenmp {SANITIZERS}", "", ""),
        ("-march=native -fsanitize=thread", "", ""),  # threads of the standard library
        ("-march=x86-64-v3", "avx2", "AVX2"),
        ("-march=x86-64-v4", "avx512bw", "AVX-512"),
        ("-march=icelake-server", "avx512_vnni", "AVX-512"),
        ("-march=alderlake", "avx_vnni", "AVX2"),
        ("-march=x86-64-v4 -mavxvnni", "avx_vnni", "AVX-512"),
    ],
)
def test_x86(flags, needs, expected, tmp_path):
    program = compiled("g++", flags, tmp_path / "check")
    if needs in kernels._cpu():
        assert expected in run(program)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["armv8-a", "armv8.2-a+dotprod"])
def test_arm(arch, tmp_path):
    program = compiled("aarch64-linux-gnu-g++", f"-march={arch} -static", tmp_path / "check")
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not installed")
    assert run("qemu-aarch64", "-cpu", "max", program) == "NEON"
