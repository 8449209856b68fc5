# Every target does its own set-up; `make demo` and `make test` are the two to know.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: setup demo test lint bench bench-gpu clean

setup: .venv/installed

# Rebuilt when a C++ source or a pin changes; Python sources are used in place. In an isolated build, whose folder has
# another name each time, CMake would compile everything anew.
.venv/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]" \
		--config-settings=cmake.define.BLOCKSPARSE_EMULATE_AMX=ON
	touch $@

demo: setup
	$(BIN)/blocksparse demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*

bench: setup
	$(BIN)/python benchmarks/reach.py

bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv build dist
