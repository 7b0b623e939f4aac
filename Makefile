# Each target does its own set-up: a fresh clone needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
N ?= 1.0
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint types bench torture journeys sweep docs clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[dev]'
	touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	$(BIN)/gradfix demo --json demo/results.json --report demo/report.html

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

torture: $(VENV)/.dev
	$(BIN)/python -m tests.torture --share $(N)

journeys: $(VENV)/.dev
	JOURNEYS=all $(BIN)/python -m pytest tests/journeys -n auto --dist worksteal
	$(BIN)/python -m tests.journeys.expected --write

sweep: $(VENV)/.dev
	$(BIN)/python -m tests.sweep

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site demo
