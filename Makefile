# Set-up, the demo and the checks; each goal makes what it needs of its own environment in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0
SOURCES := tvm_qopt schedules tests

.PHONY: help demo test check lint types clean

help:
	@echo "make demo    train a small network on real digits with the compiled 8-bit AdamW"
	@echo "make test    every check: lint, types, all tests"
	@echo "make check   the fast ones: lint, types, the tests that need no compiler"
	@echo "make clean   remove the environment and what the tools left"

demo: $(VENV)/.demo
	$(BIN)/tvm-qopt demo

test: lint types
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: lint types
	$(BIN)/python -m pytest tests/pure

lint: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.test
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is older than pyproject.toml when what it stands for has to be installed again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
		|| { echo "$(PYTHON) is not Python 3.10 to 3.13: make PYTHON=... names another"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	$(PIP) install --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml
	$(PIP) install --editable '.[cuda,demo,dev,peers,torch,trainers,tune]' '$(TORCH)'
	touch $@ $(VENV)/.demo
