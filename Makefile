# Every target sets up what it needs: a virtual environment in .venv with this project installed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUNS   := $(VENV)/.runs
STAMP  := $(VENV)/.installed
# Two files of tests at a time, each on one thread: threads of two processes would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# Types are checked while tests run: one thread, for most of a minute.
BESIDE := $(MAKE) --no-print-directory -j 2 types

.PHONY: demo test check bench lint types all-tests fast-tests clean help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

$(RUNS): pyproject.toml
	@echo "Installing parcae and what it needs into $(VENV): 1.3 GB; about two minutes, more with a slow network ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $(RUNS)

$(STAMP): $(RUNS)
	@echo "Installing what tests need ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

demo: $(RUNS)  ## see what looping does, in a picture; AGAIN=1 trains anew
	$(BIN)/parcae demo --out out/demo $(if $(AGAIN),--again)
	@echo "          (first: source $(VENV)/bin/activate, which puts parcae on your path)"

test: $(STAMP) lint  ## lint, types and every test: under twenty minutes
	$(BESIDE) all-tests

check: $(STAMP) lint  ## lint, types and the fast tests: under two minutes
	$(BESIDE) fast-tests

all-tests: $(STAMP)
	$(PYTEST) --durations=25

fast-tests: $(STAMP)
	$(PYTEST) -m 'not slow'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/pyright --project pyproject.toml

bench: $(STAMP)  ## side-by-side measurements, printed as ratios
	$(BIN)/python benchmarks/train_step.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis .import_linter_cache
