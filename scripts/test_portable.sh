#!/usr/bin/env bash
# The numeric tests as on other machines: with fewer instruction sets in PyTorch and MKL, with the
# kernels compiled for other CPUs (only compiled where this one lacks the instructions), without OpenMP,
# and without a compiler. `make test-portable` calls this; the only argument is the Python to use.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
kernels=(tests/golden tests/infer/test_native.py)
numeric=("${kernels[@]}" tests/model tests/infer/test_network.py tests/infer/test_quantise.py
  tests/training/test_muon.py tests/training/test_optim.py tests/training/test_adamw_atan2.py)

run() { # VARIABLE=VALUE ... -- TEST ...
  local settings=()
  while [ "$1" != -- ]; do
    settings+=("$1")
    shift
  done
  shift
  echo "== ${settings[*]}"
  env OMP_NUM_THREADS=1 "${settings[@]}" "$python" -m pytest -q -n 2 -m 'not slow' "$@"
}

runs_here() { # an x86-64 level, as the C library's loader reports it
  local loader=/lib64/ld-linux-x86-64.so.2
  [ "$1" = x86-64 ] || { [ -x "$loader" ] && "$loader" --help | grep -q "$1 (supported"; }
}

echo "== the kernels alone, compiled for other CPUs, ARM among them (g++-aarch64-linux-gnu, qemu-user)"
OMP_NUM_THREADS=1 "$python" -m pytest -q -n 2 tests/infer/test_native_targets.py
run CXX=/bin/false -- "${numeric[@]}"
run PARCAE_CXXFLAGS=-fno-openmp -- "${kernels[@]}"
if [ "$(uname -m)" = x86_64 ]; then
  run ATEN_CPU_CAPABILITY=default -- "${numeric[@]}"
  run ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 -- "${numeric[@]}"
  for level in x86-64 x86-64-v3 x86-64-v4; do
    if runs_here "$level"; then
      run "PARCAE_CXXFLAGS=-march=$level" -- "${kernels[@]}"
    else
      echo "== -march=$level: compiled only, this CPU cannot run it"
      "${CXX:-g++}" -O3 -std=c++20 -fopenmp -fPIC -shared "-march=$level" -o /dev/null \
        src/parcae/infer/native/*.cpp
    fi
  done
fi
