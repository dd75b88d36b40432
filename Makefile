# Two commands on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each worker runs whole test files, in the order of tests/conftest.py. More than 8 workers use much
# memory and save little time.
TEST_WORKERS := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# make demo TORCH_INDEX=ADDRESS takes torch from another index, e.g. that of the wheels for CPUs.
INSTALL_TORCH := $(if $(TORCH_INDEX),$(PIP_INSTALL) -i $(TORCH_INDEX) torch,@:)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast check lint kernels format fuzz attack docs bench build release clean

help:  ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## Train and query ELIAS on a real corpus, on the CPU
	$(BIN)/elias demo

# Numbers of passed tests to check (tests/floor.json). Without Chromium, those of the page are skipped.
FLOORS := tests
test: $(VENV)/.installed-dev  ## Run lint, types and all tests
	@$(MAKE) --no-print-directory -j 2 lint kernels
	$(BIN)/python -m pytest $(TEST_WORKERS) --floors $(FLOORS)

test-fast: $(VENV)/.installed-dev  ## Run the unit and property tests that take little time
	$(BIN)/python -m pytest $(TEST_WORKERS) -q -m "not slow" tests/unit tests/properties

check: test build  ## Run everything that must pass before a release

lint: $(VENV)/.installed-dev  ## Run formatting, lint, types and layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

kernels: $(VENV)/.installed-dev
	$(BIN)/python -m elias.training.numba_cache

format: $(VENV)/.installed-dev  ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

FUZZ_MINUTES := 20
fuzz: $(VENV)/.installed-dev  ## Run the property and fuzz tests with fresh seeds, for 20 minutes
	$(BIN)/python scripts/fuzz.py --minutes $(FUZZ_MINUTES)

attack: $(VENV)/.installed-dev  ## Attack the package for ten minutes, and print what came of it
	PYTHONPATH=src:tests $(BIN)/python scripts/attack/run.py

docs: $(VENV)/.installed-dev  ## Build the documentation as a site into build/site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open build/site/index.html. Its search needs a server: python3 -m http.server -d build/site"

bench: $(VENV)/.installed  ## Time the hot code on the CPU against simple implementations
	$(BIN)/python benchmarks/cpu_bench.py --out runs/bench

build: $(VENV)/.installed-dev  ## Build the wheels and the source archive into dist/
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --wheel --outdir dist runtime

# make release DRAFT=1 tries it before the changelog names the release.
release: $(VENV)/.installed-dev  ## Build what is published into dist/, install it into empty environments and try it
	TORCH_INDEX=$(TORCH_INDEX) scripts/release.sh $(BIN)/python $(if $(DRAFT),--draft)

# .hypothesis stays, too: it has the examples that make fuzz found.
clean:  ## Remove the environment, caches and builds; runs/ and data/ stay
	rm -rf $(VENV) build dist .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: the environment is reused until pyproject.toml or constraints.txt changes.
$(BIN)/python:
	@echo "Creating $(VENV) ..."
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ELIAS into $(VENV) (torch is large; a slow connection takes minutes) ..."
	$(INSTALL_TORCH)
	$(PIP_INSTALL) -e '.[serve]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ELIAS and its development tools into $(VENV) ..."
	$(INSTALL_TORCH)
	$(PIP_INSTALL) -e '.[dev,serve,export,docs]'
	@touch $(VENV)/.installed $@
