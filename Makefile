# make demo   train a small language model on real text through fa4, on whatever device is here
# make test   every test that runs without a GPU
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.fa4-installed

.PHONY: setup demo test soak lint clean

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
	$(BIN)/python -m pytest -n 2 -m "not soak"

soak: setup
	$(BIN)/python -m pytest -n 2 -m soak

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) build *.egg-info
