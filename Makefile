# make train   set up everything, run the main job on the embedded data set, end with a report and a checkpoint
# make test    set up everything, run all tests but the slow ones
# make chaos   220 seeded faults in real runs; SEED=17 plays one again, SEED=100 COUNT=50 plays fifty others
#
# Every distribution is installed by the version and hash in constraints/locks; `make lock` resolves them anew.
#
# TORCH=cpu (default) takes torch's CPU build from the configured pip index or, if that has none, from TORCH_INDEX.
# TORCH=cuda takes the CUDA build and its locks.

PYTHON ?= python3
TORCH ?= cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV ?= .venv
BIN := $(VENV)/bin
LOCKS := constraints/locks
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# A lock is complete, so nothing else is resolved, and builds use its setuptools.
LOCKED := $(PIP) --require-hashes --no-deps --no-build-isolation --use-pep517
export OMP_NUM_THREADS ?= 1

.PHONY: setup train test test-slow chaos lint types lock bench-quality docs clean

setup: $(VENV)/.installed

$(VENV)/.torch-$(TORCH): $(LOCKS)/build.txt $(LOCKS)/torch-cpu.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(LOCKED) -r $(LOCKS)/build.txt
ifeq ($(TORCH),cpu)
	@echo "installing torch's CPU build"
	@$(LOCKED) -r $(LOCKS)/torch-cpu.txt 2>/dev/null \
	  || $(LOCKED) --index-url $(TORCH_INDEX) -r $(LOCKS)/torch-cpu.txt \
	  || { echo "error: no CPU build of torch with a locked hash in the configured index or in $(TORCH_INDEX): set TORCH_INDEX, or TORCH=cuda" >&2; exit 1; }
	@$(PIP) --no-deps --no-build-isolation ./packaging/fbgemm-gpu
endif
	@touch $@

$(VENV)/.installed: $(VENV)/.torch-$(TORCH) $(LOCKS)/$(TORCH).txt pyproject.toml
	@echo "installing gemctl"
	@$(LOCKED) -r $(LOCKS)/$(TORCH).txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed $(LOCKS)/$(TORCH)-test.txt
	@echo "installing the test and lint tools"
	@$(LOCKED) -r $(LOCKS)/$(TORCH)-test.txt
	@$(BIN)/python -m pip check
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

# torch comes from one index alone, which also mirrors other packages; those come from the configured index.
UV := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command "make lock"
RESOLVE_cpu := -c constraints/cpu.txt packaging/fbgemm-gpu/pyproject.toml --excludes constraints/cpu-excludes.txt \
  --find-links $(TORCH_INDEX)/torch/ --no-emit-package torch
RESOLVE_cuda := -c constraints/cuda.txt

lock: $(VENV)/.installed-test
	echo setuptools | $(UV) - -c constraints/cuda.txt -o $(LOCKS)/build.txt
	grep '^torch==' constraints/cpu.txt | sed 's/$$/+cpu/' | $(UV) --no-deps --default-index $(TORCH_INDEX) - -o $(LOCKS)/torch-cpu.txt
	$(UV) pyproject.toml $(RESOLVE_cpu) -c $(LOCKS)/build.txt -o $(LOCKS)/cpu.txt
	$(UV) pyproject.toml --all-extras $(RESOLVE_cpu) -c $(LOCKS)/cpu.txt -o $(LOCKS)/cpu-test.txt
	$(UV) pyproject.toml $(RESOLVE_cuda) -c $(LOCKS)/build.txt -o $(LOCKS)/cuda.txt
	$(UV) pyproject.toml --all-extras $(RESOLVE_cuda) -c $(LOCKS)/cuda.txt -o $(LOCKS)/cuda-test.txt

docs: $(VENV)/.installed-test
	$(BIN)/python -m gemctl.reference > docs/reference.md
	$(BIN)/python -m gemctl.architecture

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
