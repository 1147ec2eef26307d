# The workshop. `make help` lists the targets; a second call of any of them repeats no work.

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check

RUST_SOURCES := $(shell find crates -name '*.rs' -o -name '*.toml' 2>/dev/null) $(wildcard Cargo.toml Cargo.lock)
# maturin finds the virtual environment by this variable, wherever the caller's own points.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup train test test-full test-torch lint lint-python lint-rust lint-stubs stubs fmt bench bench-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------------------------------------------------- set-up

setup: $(VENV)/.built ## make .venv, install what is needed, build the Rust core

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than Python 3.11; name another with PYTHON=..."; exit 1; }
	@command -v cargo >/dev/null || { echo "make: cargo is not on PATH; the core is written in Rust"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.deps: pyproject.toml $(VENV)/.made
	@echo "make: installing torch and the tools into $(VENV); the first time this downloads a few GB"
	$(PIP_INSTALL) --group runtime --group workshop
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
	SHARDCORE_FULL=1 cargo test --workspace --quiet
	$(PY) -m pytest -m "full or not full" $(ARGS)

test-torch: setup ## run the Python tests with another torch, e.g. make test-torch V=2.13.0
	@test -n "$(V)" || { echo "usage: make test-torch V=2.13.0"; exit 2; }
	$(PYTHON) -m venv .cache/torch-$(V)
	.cache/torch-$(V)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.cache/torch-$(V)/bin/python -m pip install --quiet --group runtime --group workshop 'torch==$(V)'
	VIRTUAL_ENV=$(CURDIR)/.cache/torch-$(V) .cache/torch-$(V)/bin/maturin develop --release --quiet
	.cache/torch-$(V)/bin/python -m pytest $(ARGS)

# ------------------------------------------------------------------------------------------------------------ lint

lint: lint-python lint-rust lint-stubs ## ruff, mypy, import contracts, rustfmt, clippy, stub freshness

lint-python: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# rustfmt and clippy are parts of the Rust toolchain that a machine may lack and this Makefile does not install.
lint-rust:
	@if cargo fmt --version >/dev/null 2>&1; then cargo fmt --all --check; \
		else echo "lint: cargo fmt is not installed here, so the Rust format was NOT checked"; fi
	@if cargo clippy --version >/dev/null 2>&1; then cargo clippy --workspace --all-targets --quiet -- -D warnings; \
		else echo "lint: cargo clippy is not installed here, so the Rust lints were NOT run"; fi

# $(call write-stubs,FOLDER): the type stubs of the Rust core as FOLDER/shardcore/_core.pyi, formatted.
define write-stubs
	$(BIN)/maturin generate-stubs --quiet --features stubs --out $(1)
	@$(BIN)/ruff check --quiet --fix-only $(1)/shardcore/_core.pyi
	@$(BIN)/ruff format --quiet $(1)/shardcore/_core.pyi
endef

lint-stubs: setup
	$(call write-stubs,target/stubs)
	@diff -u python/shardcore/_core.pyi target/stubs/shardcore/_core.pyi || \
		{ echo "lint: the stubs of the Rust core are not those of its source; run 'make stubs'"; exit 1; }

stubs: setup ## write the type stubs of the Rust core again
	$(call write-stubs,python)

fmt: setup ## format Python and Rust
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	cargo fmt --all

# ----------------------------------------------------------------------------------------------------------- bench

bench: setup ## measure a training step against DDP and FSDP2 (and DeepSpeed, once bench-peers has run)
	$(PY) benches/e2e/train.py $(ARGS)

bench-peers: setup ## install the libraries that `make bench` compares with
	$(PIP_INSTALL) --no-build-isolation --group peers

clean: ## remove everything that was built, .venv included
	rm -rf $(VENV) .cache target dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find python tests examples benches -name '__pycache__' -prune -exec rm -rf {} +
	rm -f python/shardcore/_core*.so
