# Needs Python 3.11 or newer (not 3.12.0 to 3.12.2), make, and a package index that pip knows of. Everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
LOCK_FLAGS ?= # --upgrade: upgrade all packages; --upgrade-package NAME: one of them

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Folders too: a folder changes when a file in it is deleted.
SOURCES := pyproject.toml README.md LICENSE $(shell find leasekit adapters -name __pycache__ -prune -o -print)

.DEFAULT_GOAL := help
# All targets share one environment, and only one pip at a time may write to it. The tools use all cores themselves.
.NOTPARALLEL:

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | while IFS='	' read -r name text; do printf '  make %-8s %s\n' "$$name" "$$text"; done

.PHONY: demo
demo: $(VENV)/leasekit ## Run `leasekit demo`
	@$(BIN)/leasekit demo

.PHONY: test
test: $(VENV)/dev $(VENV)/leasekit ## Test the installed package (ARGS=… goes to pytest)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --maxprocesses 16 --dist worksteal $(ARGS)

.PHONY: soak
soak: $(VENV)/dev $(VENV)/leasekit ## Run all cases of the tests that run a sample of them in `make test`
	@LEASEKIT_SOAK=1 $(BIN)/pytest -m soak -n auto --timeout 1800 -o faulthandler_timeout=2000 $(ARGS)

.PHONY: check
check: $(VENV)/dev ## Lint, format and types (changes nothing)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python --warnings

.PHONY: bench
bench: $(VENV)/dev $(VENV)/leasekit ## Run the benchmarks (ARGS=--quick)
	@set -e; for file in benchmarks/[a-z]*.py; do $(BIN)/python "$$file" $(ARGS); done

.PHONY: simulate
simulate: $(VENV)/dev ## Simulate three thousand hours of faults, and check every promise (ten minutes)
	@$(BIN)/python -m harness.simulation $(ARGS)

.PHONY: mutants
mutants: $(VENV)/dev ## Break each rule on purpose; the simulation must find it
	@$(BIN)/python -m harness.simulation.mutants $(ARGS)

.PHONY: chaos
chaos: $(VENV)/dev $(VENV)/leasekit ## Every fault on real processes, then 20,000 tasks with kill -9 of workers and server
	@$(BIN)/python -m harness.chaos $(ARGS)

.PHONY: docs
docs: $(VENV)/docs $(VENV)/dev $(VENV)/leasekit ## Build the documents into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: lock
lock: | $(VENV)/python ## Write requirements/*.txt from pyproject.toml
	@$(PIP) install uv
	@$(call compile,dev) --extra redis --extra sqs --group dev
	@$(call compile,run) --group build --constraints requirements/dev.txt
	@$(call pin,docs) --group docs --constraints requirements/dev.txt

.PHONY: clean
clean: ## Remove the environment and all caches
	@rm -rf $(VENV) dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find leasekit adapters tests harness examples benchmarks docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# One lock for every Python and platform, without the address of the package index.
pin = $(BIN)/uv pip compile --quiet $(2) --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	$(LOCK_FLAGS) --output-file requirements/$(1).txt
compile = $(call pin,$(1),pyproject.toml --extra server)

# Stamps of what is installed: $(VENV)/run to build and run leasekit, $(VENV)/dev to develop it, $(VENV)/docs to build
# the pages, $(VENV)/leasekit the package itself, from a wheel as users get it.

$(VENV)/python:
	@$(PYTHON) -c 'import sys; of = sys.version_info[:3]; \
		sys.exit((of < (3, 11) or (3, 12) <= of < (3, 12, 3)) and \
			"leasekit needs Python 3.11 or newer, but 3.12.0 to 3.12.2 (gh-113964), not %d.%d.%d: " % of + \
			"make $(MAKECMDGOALS) PYTHON=python3.13")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/run: requirements/run.txt | $(VENV)/python
	@echo 'installing the dependencies of leasekit into $(VENV) …'
	@$(PIP) install --require-hashes --no-deps -r $<
	@touch $@

$(VENV)/dev: requirements/dev.txt | $(VENV)/run
	@echo 'installing the development tools into $(VENV) …'
	@$(PIP) install --require-hashes --no-deps -r $<
	@touch $@

$(VENV)/docs: requirements/docs.txt | $(VENV)/run
	@echo 'installing the documentation tools into $(VENV) …'
	@$(PIP) install --require-hashes --no-deps -r $<
	@touch $@

$(VENV)/leasekit: $(SOURCES) $(VENV)/run
	@touch $@.new # the time before the build: files that are edited meanwhile cause another build
	@$(PIP) install --no-index --no-deps --no-build-isolation --force-reinstall .
	@mv $@.new $@
