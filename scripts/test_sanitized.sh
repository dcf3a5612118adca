#!/usr/bin/env bash
# Random small models decoded by C++ kernels that are compiled with the address and undefined-behaviour
# sanitizers, against PyTorch; the first finding ends the run. `make test-sanitized` calls this.
#   scripts/test_sanitized.sh [PYTHON] [CONFIGURATIONS]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
compiler=${CXX:-g++}
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
# The sanitizers' libraries must be loaded before Python, which is not compiled with them.
libraries="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
env LD_PRELOAD="$libraries" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  XDG_CACHE_HOME="$cache" OMP_NUM_THREADS=1 PYTHONPATH="${PYTHONPATH:-src}" \
  PARCAE_CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
  "$python" tests/infer/test_random_configurations.py --count "${2:-1000}"
