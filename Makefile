# make run        .venv with the server, an example model, then the server in the foreground; Ctrl-C ends it
# make setup      .venv with everything for development; quick when nothing changed
# make test       setup, then the tests of the server, in two processes; ARGS="tests/model_store -x" goes to pytest
# make test-fast  setup, then the tests without a cluster, without models and without other processes
# make test-slow  setup, then the long tests: browsers, restarts, several servers
# make test-nightly  setup, then the tests that .ci/run leaves out: examples, clean environments, hosts, faults under load
# make coverage   setup, then the first two tiers with the coverage of every process, by package
# make bench      setup, then the comparison with other servers
# make compare-torchserve  TorchServe's answers to the cases of tests/torchserve_cases, recorded again; ARGS="CASE …" selects
# make screenshots  the pictures of the console in docs/images/console
# make docs       the site of the documentation, with the generated reference, in build/site; ARGS=--serve shows it
# make release    wheel, source distribution, bill of materials and changelog section in dist/
# make lint       the schemas of the workflows, ruff, the import contracts and mypy
# make system-packages  the programs that tests use, from Debian's packages; needs root
# make clean      removes what the targets above made; your archives and the server's state stay

# Python 3.11 first, on which the whole set is installed and tested most; else the newest that fits.
PYTHON ?= $(shell for python in python3.11 python3.13 python3.12 python3.10 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Bytecode is compiled when a module is imported: most modules of the packages never are.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt
CREATED := $(VENV)/.created
SERVER := $(VENV)/.server
INSTALLED := $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder
MODEL := model_store/digits.mar

# Without bytecode files, each process of a test compiles the server's modules again, and pytest each test.
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.PHONY: help setup run test test-fast test-slow test-nightly coverage bench compare-torchserve screenshots docs release lint lint-workflows system-packages clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(INSTALLED) $(MODEL)

$(CREATED):
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 with its venv module was found." \
		"Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { echo "$(PYTHON) is" \
		"$$($(PYTHON) --version 2>&1), and Python 3.10 to 3.13 is needed." \
		"Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@# The pip of Python 3.11 takes 6 minutes where this one takes 2.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=26'
	@touch $@

$(SERVER): $(CREATED) pyproject.toml constraints.txt
	@echo "Installing Torchrelay's server into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) --editable '.[server,onnx]'
	@umask 077 && $(BIN)/ray get-auth-token --generate >/dev/null 2>&1
	@touch $@

$(INSTALLED): $(SERVER)
	@echo "Installing the packages for development into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@# jsonschema imports its grammar where it is installed, which takes 2.4 s of every process that imports Ray.
	@$(BIN)/python -m pip uninstall --quiet --yes rfc3987-syntax
	@touch $@

$(MODEL): $(wildcard examples/01_first_model/*.*) | $(SERVER)
	@echo "Training the example model into $@"
	@$(BIN)/python examples/01_first_model/train.py

run: $(SERVER) $(MODEL)
	@$(BIN)/torchrelay start --dashboard --example digits=examples/01_first_model/three.png

test: setup
	@$(PYTEST) -m "not slow and not nightly" $(ARGS)

test-fast: setup
	@$(PYTEST) -m "not cluster and not integration and not slow and not nightly" $(ARGS)

test-slow: setup
	@$(PYTEST) -m "slow and not nightly" $(ARGS)

test-nightly: setup
	@$(PYTEST) -m nightly $(ARGS)

coverage: setup
	@rm -rf build/coverage && mkdir -p build/coverage
	@for tier in "not slow and not nightly" "slow and not nightly"; do \
		PYTHONPATH=. COVERAGE_FILE=$(CURDIR)/build/coverage/data $(PYTEST) --cov --cov-append --cov-report= -m "$$tier" $(ARGS) || exit; done
	@PYTHONPATH=. $(BIN)/python -m tests.support.coverage_report build/coverage

bench: setup
	@$(BIN)/python -m tests.benchmarks.suite $(ARGS)

compare-torchserve: setup
	@$(BIN)/python -m tests.torchserve_cases.record $(ARGS)

screenshots: setup
	@$(BIN)/python -m tests.recorders.screenshots $(ARGS)

docs: $(INSTALLED)
	@$(BIN)/python docs/build_site.py $(ARGS)

release: $(INSTALLED)
	@.ci/package

lint: $(INSTALLED) lint-workflows
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "Format with: $(BIN)/ruff format ." >&2; exit 1; }
	@PYTHONPATH=. $(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

lint-workflows: $(INSTALLED)
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml

system-packages:
	@.ci/system-packages

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(MODEL)
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
