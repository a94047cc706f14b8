# Each target does its own set-up: a private .venv, made once and again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A class of tests stays with one worker: its tests may share a process.  conftest.py has the longest first.
PYTEST := $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder

.PHONY: unit test demo check peers torch-env torch trial bench dist clean

# What needs no process and no socket of its own.
unit: $(VENV)/ready
	$(PYTEST) -n auto --ignore=tests/loopback --ignore=tests/torch

# Everything; most of it waits, so there are more workers than cores.
test: $(VENV)/ready
	$(PYTEST) -n 4 --cov

demo: $(VENV)/ready
	$(BIN)/flodl-tw run -n 4 --hosts 2 -- $(BIN)/python examples/meet.py

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

peers: $(VENV)/ready
	$(BIN)/python peers/check_fdl.py

# Where it has made them, `make test` runs the tests with real torch, too.
torch-env: $(VENV)/ready
	$(BIN)/python peers/torch_env.py

torch: torch-env
	$(PYTEST) -n 2 -rs tests/torch

trial: $(VENV)/ready
	$(BIN)/python -m twisted.trial tests

bench: $(VENV)/ready
	$(BIN)/python benchmarks/join.py

# An sdist, and a wheel built from it, in dist/.
dist: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group release
	$(BIN)/python -m build

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group test --group check --editable .
	touch $@

clean:
	rm -rf $(VENV) dist _trial_temp* .coverage .pytest_cache .mypy_cache .ruff_cache
