#!/usr/bin/env bash
# Run schemathesis over the OpenAPI schema of `parcae serve`: no request that it makes may be answered
# with a 5xx or otherwise than the schema says. `make test-api` calls this; the only argument is the
# Python to use. schemathesis is installed into .venv-api, because its dependencies are not ours.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
env=${PARCAE_API_ENV:-.venv-api}
version=4.32.5
examples=${EXAMPLES:-100}
status=0
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT

if ! "$env/bin/python" -c "import schemathesis" 2>/dev/null; then
  echo "Installing schemathesis $version into $env ..."
  python3 -m venv "$env"
  if ! "$env/bin/pip" install --quiet "schemathesis==$version"; then
    echo "SKIPPED: schemathesis $version cannot be installed here"
    exit 0
  fi
fi

PYTHONPATH=tests "$python" - "$work/model" <<'PYTHON'
import sys
from pathlib import Path

import parcae
from oracles import text_model, tokenizer

folder = Path(sys.argv[1])
parcae.save(text_model(), folder)
tokenizer().save(folder / "tokenizer.json")
PYTHON
"$python" -m parcae serve "tiny=$work/model" --port 0 >"$work/log" &
server=$!
until grep -q '^Serving on' "$work/log"; do
  kill -0 "$server" || exit 1
  sleep 0.2
done
url=$(cut -d ' ' -f 3 "$work/log")
# A schema cannot say all that a request must fulfil, such as draft < num_loops.
"$env/bin/schemathesis" run "$url/openapi.json" --max-examples "$examples" --seed 1 \
  --exclude-checks positive_data_acceptance || status=$?
echo "Answers by path and status, as the server counted them:"
"$python" - "$url/metrics" <<'PYTHON'
import sys
from urllib.request import urlopen

lines = [line for line in urlopen(sys.argv[1]).read().decode().splitlines() if "requests_total{" in line]
print(*lines, sep="\n")
sys.exit(any('status="5' in line for line in lines) or not any('status="200"' in line for line in lines))
PYTHON
exit "$status"
