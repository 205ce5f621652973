# make train   set up everything, run the main job on the embedded data set, end with a report and a checkpoint
# make test    set up everything, run all tests but the slow ones
# make chaos   220 seeded faults in real runs; SEED=17 plays one again, SEED=100 COUNT=50 plays fifty others
#
# TORCH=cpu (default) takes torch's CPU build from the configured pip index or, if that has none, from TORCH_INDEX.
# TORCH=cuda takes the CUDA build and its constraints.

PYTHON ?= python3
TORCH ?= cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/$(TORCH).txt
TORCH_VERSION := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS)
SOURCES := pyproject.toml $(CONSTRAINTS)
export OMP_NUM_THREADS ?= 1

.PHONY: setup train test test-slow chaos lint types bench-quality docs clean

setup: $(VENV)/.installed

$(VENV)/.torch-$(TORCH): $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),cpu)
	@echo "installing torch $(TORCH_VERSION)+cpu"
	@$(PIP) "torch==$(TORCH_VERSION)+cpu" 2>/dev/null \
	  || $(PIP) --extra-index-url $(TORCH_INDEX) "torch==$(TORCH_VERSION)+cpu" 2>/dev/null \
	  || { echo "error: no CPU build of torch $(TORCH_VERSION) in the configured index or in $(TORCH_INDEX): set TORCH_INDEX, or TORCH=cuda" >&2; exit 1; }
	@$(PIP) ./packaging/fbgemm-gpu
else
	@$(PIP) "torch==$(TORCH_VERSION)" fbgemm-gpu
endif
	@touch $@

$(VENV)/.installed: $(VENV)/.torch-$(TORCH) $(SOURCES)
	@echo "installing gemctl"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed $(SOURCES)
	@echo "installing the test and lint tools"
	@$(PIP) -e ".[test,dev]"
	@touch $@

train: $(VENV)/.installed
	@$(BIN)/gemctl train experiment=synthetic
	@echo "The same model with every event history emptied, to see what the histories are worth:"
	@$(BIN)/gemctl train experiment=synthetic data.histories=empty run.name=synthetic-empty
	@$(BIN)/gemctl report "$$(ls -d runs/synthetic/* | tail -1)" --diff "$$(ls -d runs/synthetic-empty/* | tail -1)"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow" tests

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow tests

chaos: $(VENV)/.installed-test
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT))

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-test
	$(BIN)/mypy

bench-quality: $(VENV)/.installed
	$(BIN)/python -m gemctl.bench.quality

docs: $(VENV)/.installed
	$(BIN)/python -m gemctl.reference > docs/reference.md

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
