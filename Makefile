# make demo   train a small language model on real text through fa4, on whatever device is here
# make test   every test that runs without a GPU
# make gpu    every test that needs one, on the backends that the chip here offers
# make docs   the pages as a site, in build/site
# make first-day   a chip that no kernel has run on yet: all of it, in order
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.fa4-installed
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# Neighbouring tests share compiled kernels, so each worker starts on a stretch of its own and steals when it is done.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup demo test gpu first-day soak lint docs clean

setup: $(STAMP)

# The extension module is part of the build, so its sources are prerequisites too.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard fa4/emulator/machine/core/*) $(wildcard fa4/emulator/host/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m fa4 demo

test: setup
	$(PYTEST) -m "not soak"

gpu: setup
	$(BIN)/python -m pytest -m "gpu and not soak"

first-day: setup
	$(BIN)/python -m tests.gpu.first_day

soak: setup
	$(PYTEST) -m soak

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

docs: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf $(VENV) build *.egg-info
