# Every target installs what it needs into a virtual environment, .venv.
PYTHON ?= python3
# The oldest PyTorch that works, so that a build without CUDA of it is found where pip looks first.
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
RUNS   := $(VENV)/.runs
STAMP  := $(VENV)/.installed
# Hundreds of test processes import parcae: without compiled modules each would compile it again.
export PYTHONDONTWRITEBYTECODE :=
# Test processes with one thread each: with two threads each they would compete for cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal
# Type checking (single-threaded, about a minute) runs at the same time as the tests.
PARALLEL := $(MAKE) --no-print-directory -j 2 types

.PHONY: demo test fuzz test-faults soak test-api audit test-portable test-sanitized check test-vllm docs bench lint types all-tests fast-tests clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

$(RUNS): pyproject.toml
	@echo "Installing parcae and its dependencies into $(VENV): 1.3 GB, about two minutes ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/ci.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' --editable '.[serve]'
	touch $(RUNS)

$(STAMP): $(RUNS)
	@echo "Installing the development dependencies ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

demo: $(RUNS)  ## train two small looped models, draw what loops do, generate text; AGAIN=1 retrains
	$(BIN)/parcae demo --out out/demo $(if $(AGAIN),--overwrite)
	@echo "          (to use the parcae command: source $(VENV)/bin/activate)"

test: $(STAMP) lint  ## lint, type check and all tests: less than 20 minutes on two cores
	$(PARALLEL) all-tests

check: $(STAMP) lint  ## lint, type check and the fast tests: less than 2 minutes
	$(PARALLEL) fast-tests

test-portable: $(STAMP)  ## the numeric tests as on other CPUs and without a compiler: some minutes
	scripts/test_portable.sh $(BIN)/python

test-sanitized: $(STAMP)  ## a thousand random models on kernels compiled with sanitizers: half an hour
	scripts/test_sanitized.sh $(BIN)/python

fuzz: $(STAMP)  ## files with random changes for every reader of outside data: 100,000 cases, about half an hour
	PYTHONPATH=tests:benchmarks OMP_NUM_THREADS=1 $(BIN)/python -m fuzz.campaign --cases $(or $(CASES),100000) $(if $(CASES),,--out results/fuzz.json)

test-faults: $(STAMP)  ## faults at every file-system event of every command: some hours; SAMPLE=20 for fewer; continues after an interruption
	PYTHONPATH=tests:benchmarks OMP_NUM_THREADS=1 $(BIN)/python -m faults.campaign --out results/faults.json $(if $(SAMPLE),--sample $(SAMPLE))

soak: $(STAMP)  ## train, then serve, for an hour each, and compare memory, descriptors and disk; MINUTES=5 for less
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py train --minutes $(or $(MINUTES),60) --record results/soak.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py serve --minutes $(or $(MINUTES),60) --record results/soak.json

test-api: $(STAMP)  ## requests of schemathesis to the server, over its whole schema: some minutes
	scripts/test_api.sh $(BIN)/python

audit: SHELL := /bin/bash
audit: $(STAMP)  ## compare the installed packages with the database of known vulnerabilities; needs the internet
	@mkdir -p out; $(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit || { echo "skipped: pip-audit cannot be installed"; exit 0; }; \
	 $(BIN)/pip-audit --local --skip-editable 2>&1 | tee out/audit.txt; status=$${PIPESTATUS[0]}; \
	 if grep -qi 'connection' out/audit.txt; then echo "skipped: the database of known vulnerabilities cannot be reached"; exit 0; fi; exit $$status

# Three processes for two cores: for a third of their time tests wait for servers, jobs and browsers.
all-tests: $(STAMP)
	$(PYTEST) -n 3 --durations=25

# One process: each would collect all tests, and type checking takes the other core.
fast-tests: $(STAMP)
	$(PYTEST) -n 0 -m 'not slow'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/pyright --project pyproject.toml

docs: $(STAMP)  ## build the documentation with its API reference into out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Built out/site. View it with: $(BIN)/python -m http.server --directory out/site 8000"

test-vllm: $(RUNS)  ## compare an exported model served by vLLM with our engine; installs vLLM into .venv-vllm
	scripts/vllm/check $(CHECKPOINT)

bench: $(STAMP)  ## compare the speed of a training step with a plain implementation
	$(BIN)/python benchmarks/train_step.py

clean:  ## remove everything the other targets created
	rm -rf $(VENV) .venv-vllm .venv-api out .pytest_cache .ruff_cache .hypothesis .schemathesis .import_linter_cache
