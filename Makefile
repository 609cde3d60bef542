# make demo   train a small language model on real text through fa4, on whatever device is here
# make test   every test that runs without a GPU
# make gpu    every test that needs one, on the backends that the chip here offers
# make sanitize   the emulator's C and C++ under AddressSanitizer and UndefinedBehaviorSanitizer
# make docs   the pages as a site, in build/site
# make lint   style and types, in an environment of its own: no torch, no compiler
# make first-day   tests and measurements of the GPU here, and one report; FLAGS=--dry-run needs no GPU
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.fa4-installed
LINTERS ?= build/linters
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# Neighbouring tests share compiled kernels, so each worker starts on a stretch of its own and steals when it is done.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup demo test gpu first-day soak sanitize lint docs clean

setup: $(STAMP)

# warpcheck's extension modules are part of the build, so their sources are prerequisites too.
CORE := $(wildcard warpcheck/setup.py warpcheck/pyproject.toml $(addprefix warpcheck/src/warpcheck/,machine/core/* timing/core/* host/*.c))
$(STAMP): pyproject.toml constraints.txt $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	mkdir -p build && bash -o pipefail -c '$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -v \
	  -e ./warpcheck 2>&1 | tee build/warpcheck.log | sed -un "/compiled .* of/p"' || { tail -40 build/warpcheck.log; false; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m fa4 demo

test: setup
	$(PYTEST) -m "not soak and not gpu" --part today

gpu: setup
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu needs a GPU that torch can use, and finds none: python -m fa4 env tells more")'
	$(BIN)/python -m pytest -m "gpu and not soak"

# With a torch of CUDA 13, CuTe DSL needs its libraries for CUDA 13.
first-day: setup
	if $(BIN)/python -c 'import sys, torch; sys.exit(not (torch.cuda.is_available() and (torch.version.cuda or "") >= "13"))'; \
	  then $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[cu13]'; fi
	$(BIN)/python -m tests.gpu.first_day $(FLAGS)

# The covering arrays, whole, note what came of them in tests/covering/stamp.json. What fails stops nothing else.
soak: setup
	failed=0; $(PYTEST) -m "(soak or rotates) and not gpu" || failed=1; \
	for chip in torch sm_80 sm_90a sm_100a sm_120a; do \
	  $(BIN)/python -m tests.covering --chip $$chip --jobs $(WORKERS) --limit 1200 --stamp || failed=1; done; \
	exit $$failed

# The compiled parts of the emulator under the sanitizers of the compiler; `make soak` runs it as a test.
sanitize: setup
	PYTHONPATH=warpcheck/tests $(BIN)/python -m warpcheck_cases.sanitized

$(LINTERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LINTERS)
	$(LINTERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt ruff mypy click
	touch $@

lint: $(LINTERS)/.installed
	$(LINTERS)/bin/python -m ruff check .
	$(LINTERS)/bin/python -m ruff format --check .
	$(LINTERS)/bin/python -m mypy

docs: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf $(VENV) build *.egg-info
