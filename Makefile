# make install | demo | demo-s3 | down | test | test-slow | test-all | chaos | lint | docs | bench
#
# PYTHON       the interpreter that makes .venv (default python3, 3.11 or newer)
# TORCH_INDEX  URL of a package index with CPU builds of torch; only needed where pip would
#              otherwise fetch CUDA packages onto a machine without a GPU
# TESTS        options of pytest for the three test targets, such as TESTS="tests/stages -x"
# CHAOS        options of the kill matrix, such as CHAOS="--only flow --rounds 5"; all of it takes hours.
#              A run that takes more than 60 s to resume fails it; CHAOS="--limit 120" on a busy machine
# STORE        folder or URL of the demo's store (default: .arealflow/store)

PYTHON ?= python3
TORCH_INDEX ?=
STORE ?=
TESTS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# One process more than cores, since tests also wait (3 on 2 cores: 8:39, 2: about 10:50). Four at most: each imports torch.
PYTEST := $(BIN)/python -m pytest --numprocesses=$$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses=4

# The tests start hundreds of processes. Where this is set, each of them would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-s3 down test test-slow test-all chaos lint docs bench

install: .venv/installed

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python cannot make a virtual environment; on Debian: apt install python3-venv"; exit 1; }

.venv/installed: pyproject.toml | .venv/bin/python
	@echo "installing arealflow into .venv"
	@$(PIP) --editable .
	@touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	@echo "installing arealflow and what its tests need into .venv"
	@$(PIP) --editable '.[dev]'
	@touch .venv/installed $@

demo: install
	@STORE='$(STORE)' deployments/demo.sh

demo-s3: .venv/installed-dev
	@deployments/demo-s3.sh

down: install
	@$(BIN)/arealflow down

test: .venv/installed-dev
	@$(PYTEST) -m "not slow" $(TESTS)

test-slow: .venv/installed-dev
	@$(PYTEST) -m slow $(TESTS)

test-all: .venv/installed-dev
	@$(PYTEST) $(TESTS)

chaos: .venv/installed-dev
	@$(BIN)/python tests/chaos/matrix.py $(CHAOS)

lint: .venv/installed-dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: .venv/installed-dev
	@$(BIN)/python -m schemas.recipe.reference

bench: .venv/installed-dev
	@for name in store embedded overhead; do $(BIN)/python -m benchmarks.$$name || exit 1; done
