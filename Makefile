# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
READY := $(VENV)/.ready

.PHONY: demo docs test test-slow test-deploy check format clean install bench bench-scale bench-memory reliability fuzz

install: $(READY)

$(BASE): pyproject.toml constraints.txt $(wildcard src/fedme/execution/compiled*.?pp)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FedMe needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(READY): $(BASE)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(BASE)
	$(BIN)/fedme demo

test: $(READY) check
	$(BIN)/pytest -n 2 -m "not slow and not deploy"

test-slow: $(READY)
	$(BIN)/pytest -m slow

test-deploy: $(READY)
	$(BIN)/pytest -n 2 -m deploy

check: $(READY)
	$(BIN)/ruff format --check --quiet src tests benchmarks website
	$(BIN)/ruff check --quiet src tests benchmarks website
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format src tests benchmarks website
	$(BIN)/ruff check --fix src tests benchmarks website

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/bench.py

bench-scale: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/scale.py

bench-memory: $(READY)
	$(BIN)/python benchmarks/memory.py

reliability: $(READY) # what docs/reliability.md promises, tried; 2 idle processors need less than half an hour
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python -m fedme_reliability

fuzz: $(READY) # damaged configurations, data files, checkpoints, messages and site files: a part of `make reliability`
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python -m fedme_reliability fuzz

clean:
	rm -rf $(VENV) benchmarks/.venvs benchmarks/results build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
