# Needs Python 3.11 or newer (not 3.12.0 to 3.12.2), make, and a package index that pip knows of. Everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
DIST ?= dist
LOCK_FLAGS ?= # --upgrade: upgrade all packages; --upgrade-package NAME: one of them

# The lock of the environment, and the one with the tests' tools on top: `make lowest` has one for both.
RUN := run
DEV := dev

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
# The tests that call other libraries: every backend's contract, the server, the command line, the plug-ins, telemetry.
BRIEF := $(addprefix tests/,adapters cli server/http server/store test_lease_async.py test_misuse.py test_registry.py \
	test_telemetry.py testing)
# Those that wait for long, kill processes, or use libraries of developers only.
NOT_BRIEF := $(addprefix tests/,adapters/brokers/test_celery.py adapters/redis/test_redis_chaos.py \
	adapters/redis/test_redis_failover.py cli/test_demo.py cli/test_dev.py cli/test_processes.py cli/test_supervisor.py \
	server/http/test_schemathesis.py server/store/test_postgres_inbox_attacked.py)
# Those of them that `make lowest` runs all the same: the life of a task in the lowest Celery.
LIFE := $(addprefix tests/adapters/brokers/test_celery.py::test_,a_task_whose_worker_was_killed_runs_again \
	what_has_ended_is_acknowledged_without_running a_copy_that_does_not_run_leaves_the_state_that_celery_has_stored \
	the_lease_of_a_killed_pool_process_does_not_keep_its_task_waiting_and_ends_as_a_crash[None] \
	a_task_that_celery_ends_at_its_time_limit_has_failed_for_good[None])
# Folders too: a folder changes when a file in it is deleted.
SOURCES := pyproject.toml README.md LICENSE $(shell find leasekit adapters -name __pycache__ -prune -o -print)

.DEFAULT_GOAL := help
# All targets share one environment, and only one pip at a time may write to it. The tools use all cores themselves.
.NOTPARALLEL:

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | while IFS='	' read -r name text; do printf '  make %-8s %s\n' "$$name" "$$text"; done

.PHONY: demo
demo: introduction $(VENV)/leasekit ## Run `leasekit demo` (ARGS=--keep: its web console stays, until Ctrl-C)
	@$(BIN)/leasekit demo $(ARGS)

.PHONY: introduction
introduction:
	@echo 'This installs leasekit into $(VENV), and then runs long work on real files while a worker is killed (a minute).'
	@echo 'Watch how the tasks of the killed worker run again elsewhere, and the checks at the end.'

.PHONY: test
test: $(VENV)/dev $(VENV)/leasekit ## Test the installed package (five minutes on two cores; ARGS=… goes to pytest)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --maxprocesses 16 --dist worksteal -m 'not slow' $(ARGS)

.PHONY: slow
slow: $(VENV)/dev $(VENV)/leasekit ## The tests that `make test` leaves out: they take long, each
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --maxprocesses 16 --dist worksteal -m slow $(ARGS)

.PHONY: brief
brief: $(VENV)/$(DEV) $(VENV)/leasekit ## Test what calls other libraries (two minutes)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n auto --maxprocesses 16 --dist worksteal -m 'not slow' \
		$(addprefix --ignore=,$(NOT_BRIEF)) $(BRIEF) $(ARGS)

.PHONY: lowest
lowest: ## `make brief` with the lowest version of each dependency (Python 3.11)
	@$(MAKE) --no-print-directory brief VENV=$(VENV)-lowest RUN=lowest DEV=lowest
	@PYTHONDONTWRITEBYTECODE= $(VENV)-lowest/bin/pytest -q -n auto --maxprocesses 16 $(foreach test,$(LIFE),'$(test)')

.PHONY: pythons
pythons: ## `make brief` with each Python in PATH that leasekit can run on
	@set -e; ran=; for python in $(PYTHONS); do \
		if ! version=$$($$python -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null); then \
			echo "SKIPPED $$python: not in PATH"; \
		elif ! $$python -c '$(SUITABLE)' >/dev/null 2>&1; then \
			echo "SKIPPED $$python: leasekit does not run on $$version"; \
		else \
			echo "$$python ($$version):"; \
			$(MAKE) --no-print-directory brief PYTHON=$$python VENV=$(VENV)-$$version; ran="$$ran $$version"; \
		fi; \
	done; echo "passed with:$${ran:- none}"; test -n "$$ran"

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
simulate: $(VENV)/dev ## Simulate hundreds of hours of faults, and check every promise (ten minutes)
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
	@echo 'open site/index.html'

.PHONY: release
release: $(VENV)/dev ## Build sdist and wheel twice, compare their sha256, list all components (CycloneDX), into dist/
	@rm -rf $(DIST)/again $(DIST)/leasekit-*
	@set -e; for folder in $(DIST) $(DIST)/again; do $(BIN)/python -m hatchling build --directory $$folder; done
	@cd $(DIST) && sha256sum leasekit-* >SHA256SUMS
	@cd $(DIST)/again && sha256sum --check --strict --quiet ../SHA256SUMS && rm -r ../again
	@PYTHONWARNINGS=ignore $(BIN)/cyclonedx-py requirements requirements/run.txt --pyproject pyproject.toml \
		--mc-type library --output-reproducible --output-file $(DIST)/sbom.cdx.json
	@cat $(DIST)/SHA256SUMS

.PHONY: lock
lock: | $(VENV)/python ## Write requirements/*.txt from pyproject.toml
	@$(PIP) install uv
	@$(call pin,dev) pyproject.toml --extra all --group dev
	@$(call pin,run) pyproject.toml --extra server --group build --constraints requirements/dev.txt
	@$(call pin,docs) --group docs --constraints requirements/dev.txt
	@$(call pin,lowest) pyproject.toml --extra all --group build --group tests --resolution lowest-direct

.PHONY: clean
clean: ## Remove the environment and all caches
	@rm -rf $(VENV) dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find leasekit adapters tests harness examples benchmarks docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# One lock for every Python and platform, without the address of the package index.
pin = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	$(LOCK_FLAGS) --output-file requirements/$(1).txt

# Stamps of what is installed: $(VENV)/run to build and run leasekit, $(VENV)/dev to develop it, $(VENV)/docs to build
# the pages, $(VENV)/lowest to build, run and test it, $(VENV)/leasekit the package itself, from a wheel as users get it.

SUITABLE = import sys; of = sys.version_info[:3]; \
	sys.exit((of < (3, 11) or (3, 12) <= of < (3, 12, 3)) and \
		"leasekit needs Python 3.11 or newer, but 3.12.0 to 3.12.2 (gh-113964), not %d.%d.%d: " % of + \
		"make $(MAKECMDGOALS) PYTHON=python3.13")

$(VENV)/python:
	@$(PYTHON) -c '$(SUITABLE)'
	@echo 'making a virtual environment in $(VENV) …'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

install = echo 'installing requirements/$*.txt into $(VENV) …' && $(PIP) install --require-hashes --no-deps -r $< && touch $@

$(VENV)/run $(VENV)/lowest: $(VENV)/%: requirements/%.txt | $(VENV)/python
	@$(install)

$(VENV)/dev $(VENV)/docs: $(VENV)/%: requirements/%.txt | $(VENV)/run
	@$(install)

$(VENV)/leasekit: $(SOURCES) $(VENV)/$(RUN)
	@echo 'building leasekit, and installing it into $(VENV) …'
	@touch $@.new # the time before the build: files that are edited meanwhile cause another build
	@$(PIP) install --no-index --no-deps --no-build-isolation --force-reinstall .
	@mv $@.new $@
