# make run    set everything up, stream one answer through all three processes, stop them
# make serve  the three processes until Ctrl-C
# make test   set everything up, pass the checks and the tests
#
# Set-up steps leave a stamp in .venv and run again only when what they depend on has changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SAY := @printf '\n== %s\n'

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: run serve test lint stubs setup tools model clean
.DEFAULT_GOAL := run

run: setup model
	@$(BIN)/slipstream demo

serve: setup model
	@exec $(BIN)/slipstream serve

test: tools model lint
	$(SAY) 'tests'
	@$(BIN)/python -m pytest

lint: tools
	$(SAY) 'ruff, mypy, stubs, import directions'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo 'run: .venv/bin/ruff format .'; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python stubs/generate.py --check
	@$(BIN)/lint-imports --no-logo

stubs: tools
	@$(BIN)/python stubs/generate.py

setup: $(STAMP)/packages
tools: $(STAMP)/tools

model: $(STAMP)/kernels
	@$(BIN)/python -m services.model.store prepare default

$(STAMP)/venv:
	$(SAY) 'virtual environment'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	@command -v g++ >/dev/null || echo 'no C++ compiler (g++): models will run on the slower reference path'
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/torch: constraints.txt | $(STAMP)/venv
	$(SAY) 'torch, the CPU build (about 200 MB)'
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(STAMP)/packages: $(STAMP)/torch pyproject.toml stubs/pyproject.toml
	$(SAY) 'packages'
	@$(PIP) -e stubs -e '.[models]'
	@touch $@

$(STAMP)/tools: $(STAMP)/packages
	$(SAY) 'tools for checks and tests'
	@$(PIP) -e '.[dev]'
	@touch $@

$(STAMP)/kernels: $(STAMP)/packages $(wildcard services/model/kernels/csrc/*) services/model/kernels/build.py
	@$(BIN)/python -m services.model.kernels build
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info stubs/*.egg-info
