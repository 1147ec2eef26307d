# The workshop. `make help` lists the targets; a second call of any of them repeats no work.

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
PIP    := $(PY) -m pip --disable-pip-version-check --quiet

RUST_SOURCES := $(shell find crates -name '*.rs' -o -name '*.toml' 2>/dev/null) $(wildcard Cargo.toml Cargo.lock)
STUB         := python/shardcore/_core.pyi
# maturin finds the virtual environment by this variable, wherever the caller's own points.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup train test test-full test-torch lint lint-python lint-rust stubs fmt bench bench-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------------------------------------------------- set-up

setup: $(VENV)/.built ## make .venv, install what is needed, build the Rust core

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than Python 3.11; name another with PYTHON=..."; exit 1; }
	@command -v cargo >/dev/null || { echo "make: cargo is not on PATH; the core is written in Rust"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.deps: pyproject.toml $(VENV)/.made
	$(PIP) install --group runtime --group dev
	@touch $@

$(VENV)/.built: $(RUST_SOURCES) $(VENV)/.deps
	$(BIN)/maturin develop --release --quiet
	@touch $@

# ------------------------------------------------------------------------------------------------------------- use

train: setup ## train a GPT on real text with every core or GPU here (ARGS="--stage 3 ...")
	$(BIN)/shardcore-launch --nproc-per-node auto examples/train_gpt.py $(ARGS)

# ----------------------------------------------------------------------------------------------------------- tests

test: lint ## lint, Rust tests, Python tests (a sample of each product)
	cargo test --workspace --quiet
	$(PY) -m pytest $(ARGS)

test-full: lint ## the same with every product and count in full
	cargo test --workspace --quiet
	$(PY) -m pytest -m "full or not full" $(ARGS)

test-torch: setup ## run the Python tests with another torch, e.g. make test-torch V=2.13.0
	@test -n "$(V)" || { echo "usage: make test-torch V=2.13.0"; exit 2; }
	$(PYTHON) -m venv .cache/torch-$(V)
	.cache/torch-$(V)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.cache/torch-$(V)/bin/python -m pip install --quiet --group runtime --group dev 'torch==$(V)'
	VIRTUAL_ENV=$(CURDIR)/.cache/torch-$(V) .cache/torch-$(V)/bin/maturin develop --release --quiet
	.cache/torch-$(V)/bin/python -m pytest $(ARGS)

# ------------------------------------------------------------------------------------------------------------ lint

lint: lint-python lint-rust ## ruff, mypy, import contracts, rustfmt, clippy, stub freshness

lint-python: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# rustfmt and clippy are parts of the Rust toolchain that a machine may lack and this Makefile does not install.
lint-rust:
	@if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check; \
		else echo "lint: cargo fmt is not installed here, so the Rust format was NOT checked"; fi
	@if cargo clippy --version >/dev/null 2>&1; then cargo clippy --workspace --all-targets --quiet -- -D warnings; \
		else echo "lint: cargo clippy is not installed here, so the Rust lints were NOT run"; fi

fmt: setup ## format Python and Rust
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	cargo fmt --all

# ----------------------------------------------------------------------------------------------------------- bench

bench: setup ## measure against the plain loop, DDP and FSDP2 (and DeepSpeed, once bench-peers has run)
	$(PY) -m benches $(ARGS)

bench-peers: setup ## install the libraries that `make bench` compares with
	$(PIP) install --requirement benches/requirements-peers.txt

clean: ## remove everything that was built, .venv included
	rm -rf $(VENV) .cache target dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find python tests examples benches -name '__pycache__' -prune -exec rm -rf {} +
	rm -f python/shardcore/_core*.so
