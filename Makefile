# Everything a contributor or a first-time user types. `make install` is implied by all of them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := export,server,broker,simulate,dev

.PHONY: install demo test test-slow check format bench docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $(STAMP)

demo: install  ## Export, start a broker, a server and six devices, train, compare, report.
	$(BIN)/shoal demo $(DEMO)

test: install  ## The default suite.
	$(BIN)/python -m pytest $(TESTS)

test-slow: install  ## Proofs that take minutes.
	$(BIN)/python -m pytest -m slow $(TESTS)

check: install  ## Format, lint, types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## Budgets as ratios measured in one run; writes benchmarks/out/bench.json.
	$(BIN)/python -m benchmarks.run

docs: install  ## Documents that are generated from the code.
	$(BIN)/python -m fleet_protocol.asyncapi > docs/asyncapi.json

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
