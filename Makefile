# Each target does its own set-up: a private .venv, made once and again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test demo check peers torch-env torch trial bench clean

test: $(VENV)/ready
	$(BIN)/python -m pytest
	$(BIN)/python -m coverage report --include='flodl_tw/core/*' --fail-under=100

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
	$(BIN)/python -m pytest --no-cov -rs tests/torch

trial: $(VENV)/ready
	$(BIN)/python -m twisted.trial tests

bench: $(VENV)/ready
	$(BIN)/python benchmarks/join.py

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group test --group check --editable .
	touch $@

clean:
	rm -rf $(VENV) _trial_temp* .coverage .pytest_cache .mypy_cache .ruff_cache
