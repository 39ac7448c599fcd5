# Two commands on a fresh machine: `make demo` and `make test`.
# Tools are started as `python -m tool`: their scripts name the interpreter by its full path, which may be too long for the kernel.
PYTHON ?= python3
VENV ?= .venv
IN_VENV := "$(VENV)/bin/python"
PIP := $(IN_VENV) -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := src tests benchmarks website tools
BASE := $(VENV)/.base
READY := $(VENV)/.ready

.PHONY: demo docs pictures test test-slow test-deploy test-clone check format clean install bench bench-scale bench-memory reliability fuzz attack

install: $(READY)

$(BASE): pyproject.toml constraints.txt $(wildcard src/fedme/execution/compiled*.?pp)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FedMe needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv "$(VENV)"
	$(PIP) -e .
	touch "$@"

$(READY): $(BASE)
	$(PIP) -e '.[dev-full]'
	touch "$@"

demo: $(BASE)
	$(IN_VENV) -m fedme demo

test: $(READY) check
	$(IN_VENV) -m pytest -n 2 -m "not slow and not deploy"

test-slow: $(READY)
	$(IN_VENV) -m pytest -m slow

test-clone: $(READY) # demo and tests, twice, in a used copy of this tree, for an ordinary user; half an hour or more
	$(IN_VENV) -m pytest -s tests/test_clone.py -m slow

test-deploy: $(READY)
	$(IN_VENV) -m pytest -n 2 --dist loadgroup -m deploy

check: $(READY)
	$(IN_VENV) -m ruff format --check --quiet $(SOURCES)
	$(IN_VENV) -m ruff check --quiet $(SOURCES)
	$(IN_VENV) -m mypy

format: $(READY)
	$(IN_VENV) -m ruff format $(SOURCES)
	$(IN_VENV) -m ruff check --fix $(SOURCES)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(IN_VENV) -m mkdocs build --quiet
	@echo "open site/index.html"

pictures: $(READY) # the pictures of docs/gallery.md and of the home page
	$(IN_VENV) website/pictures.py

bench: $(READY)
	$(IN_VENV) benchmarks/bench.py

bench-scale: $(READY)
	$(PIP) -e '.[bench]'
	$(IN_VENV) benchmarks/scale.py --docs
	$(IN_VENV) benchmarks/large.py

bench-memory: $(READY)
	$(IN_VENV) benchmarks/memory.py
	$(IN_VENV) benchmarks/memory.py --weights 100e6

reliability: $(READY) # what docs/reliability.md promises, tried; without the part `chaos`, 2 idle processors need less than half an hour
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(IN_VENV) -m fedme_reliability

fuzz: $(READY) # damaged configurations, data files, checkpoints, messages and site files: a part of `make reliability`
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(IN_VENV) -m fedme_reliability fuzz

attack: $(READY) # attacks by a server, a site and an outsider on a real federation on loopback; some minutes
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(IN_VENV) -m fedme_attacks

clean:
	rm -rf "$(VENV)" benchmarks/.venvs benchmarks/results build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
