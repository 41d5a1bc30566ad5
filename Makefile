# Every target does its own set-up: packages (as root, on Debian), a virtual environment, the built wheel in it.
# A second call costs next to nothing. `make VENV=DIR TARGET` uses another environment.

PYTHON ?= python3
# A developer's editable install in .venv is left alone: what is tested here is the wheel. Tests run as root run the
# command line as an ordinary user, who must be able to get at the environment.
HERE := $(CURDIR)
EDITABLE := $(shell grep -ls '"editable": *true' .venv/lib/python3*/site-packages/stepfence-*.dist-info/direct_url.json)
REACHABLE := $(shell .ci/reachable $(HERE))
VENV ?= $(if $(REACHABLE),$(if $(EDITABLE),$(HERE)/build/venv,$(HERE)/.venv),/var/tmp/stepfence-$(shell echo $(HERE) | cksum | cut -d' ' -f1))
BIN := $(VENV)/bin
STAMP := $(VENV)/.stepfence-wheel
DEV := $(VENV)/.stepfence-dev
SOURCES := $(shell find src -type f ! -name '*.pyc' ! -name 'isolate-*') pyproject.toml hatch_build.py README.md LICENSE
HASH := \#
SCRIPTS := $(shell find .ci slurm tests $(wildcard benchmarks) -type f -exec awk 'FNR == 1 && /^$(HASH)!.*sh$$/ { print FILENAME } { nextfile }' {} +)
PYTEST := $(BIN)/python -m pytest
CHECKS := ruff mypy shellcheck codespell imports

.PHONY: help demo test test-failed check $(CHECKS:%=check-%) chaos bench test-pyxis clean packages-venv packages-check packages-test
.DEFAULT_GOAL := test

## help: this list
help:
	@sed -n 's/^## /  make /p' Makefile

## demo: a small batch with launch faults, on this machine alone; writes stepfence-demo/report.html
demo: $(STAMP)
	$(BIN)/stepfence demo --out stepfence-demo

## test: everything but the tests marked slow; as root with a real Slurm on this machine
# Most tests wait for Slurm, so four processes, each with a cluster of its own, are right for two cores.
WORKERS ?= 4
test: packages-test $(DEV)
	$(PYTEST) -m "not slow" -n $(WORKERS) --dist loadfile

## test-failed: what failed in the last `make test`, one at a time on a machine that does nothing else
test-failed: packages-test $(DEV)
	$(PYTEST) -m "not slow" --last-failed --last-failed-no-failures none

## check: lint, types, shell scripts, spelling, direction of imports
check: packages-check $(DEV)
	@failed=; for check in $(CHECKS); do \
	  echo "== $$check"; $(MAKE) --no-print-directory check-$$check || failed="$$failed $$check"; done; \
	  [ -z "$$failed" ] || { echo "check: failed:$$failed"; exit 1; }; echo "check: $(words $(CHECKS)) of $(words $(CHECKS)) passed"
check-ruff:
	@$(BIN)/ruff check
check-mypy:
	@$(BIN)/mypy
check-shellcheck:
	@shellcheck -s sh src/stepfence/step/*.sh && shellcheck $(SCRIPTS)
check-codespell:
	@$(BIN)/codespell
check-imports:
	@$(PYTEST) -q tests/unit/test_imports.py

## chaos: random kills on a real Slurm, as root; CHAOS="--kills 1000 --seed 1" asks for others
CHAOS ?= --kills 300
chaos: packages-test $(DEV)
	$(BIN)/python tests/chaos/campaign.py $(CHAOS)

## chaos-sessions: the same for sessions; CHAOS_SESSIONS="--deaths 1000 --seed 1" asks for others
.PHONY: chaos-sessions
CHAOS_SESSIONS ?= --deaths 300
chaos-sessions: packages-test $(DEV)
	$(BIN)/python tests/chaos/sessions.py $(CHAOS_SESSIONS)

## bench: what a step costs; each benchmark makes a cluster on this machine first, as root
BENCH ?= --testcluster
bench: packages-test $(DEV)
	set -e; for script in benchmarks/*.py; do $(BIN)/python $$script $(BENCH); done

## test-pyxis: the cluster's tests against an installed Pyxis; STEPFENCE_TEST_PLUGSTACK is its line for plugstack.conf
test-pyxis: packages-test $(DEV)
	@test -n "$$STEPFENCE_TEST_PLUGSTACK" || { \
	  echo "test-pyxis: set STEPFENCE_TEST_PLUGSTACK to Pyxis's line for plugstack.conf, see docs/pyxis.md" >&2; exit 2; }
	$(PYTEST) tests/cluster -m "not standin and not slow"

## clean: remove what the other targets made
clean:
	rm -rf build dist stepfence-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src tests slurm $(wildcard benchmarks) -name __pycache__ -prune -exec rm -rf {} +
	if [ -e $(STAMP) ]; then rm -rf $(VENV); fi

packages-venv packages-check packages-test:
	@.ci/packages $(@:packages-%=%)

$(BIN)/python: | packages-venv
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(SOURCES) | packages-venv $(BIN)/python
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps build/wheel/stepfence-*.whl
	$(BIN)/python -m pip install --quiet build/wheel/stepfence-*.whl
	@touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet "$$(echo build/wheel/stepfence-*.whl)[dev]"
	@touch $@
