# Every target does its own set-up; `make demo` and `make test` are the two to know.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*/*)
PIP = $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Packages are installed uncompiled, which saves half a minute, so Python must keep what it compiles.
export PYTHONDONTWRITEBYTECODE =

# Run a command that prints little: $(call announced,what it does,the command). Prints a line for each minute.
define announced
@echo "$(1) ..."; (minutes=0; while sleep 60 >/dev/null 2>&1; do minutes=$$((minutes + 1)); \
	echo "  still going after $$minutes min: $(1)"; done) & clock=$$!; trap "kill $$clock" EXIT; \
	$(2) || { echo "Set-up stopped: $(1). It needs a network, or an index that PIP_INDEX_URL or a proxy that PIP_PROXY names," \
	"and 4 GB of free disk. Run make again to resume." >&2; exit 1; }
endef

.PHONY: setup demo docs test test-all test-jax test-gpu lint fuzz sanitize wheel-test bench bench-gpu clean

# Set-up has two steps, which share one environment and one build folder: `.venv/demo` has the library, the programs and
# the kernels for this CPU; `.venv/installed` adds the tools for development and all other kernels. Each is made again
# when a C++ source or a pin changes. Python sources are used in place.
setup: .venv/installed
.venv/demo: EXTRA := lab
.venv/demo: SETS := native
.venv/installed: EXTRA := dev
.venv/installed: SETS := tests

.venv/demo .venv/installed: $(SOURCES)
	@$(PYTHON) .ci/check_machine.py
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(call announced,Installing PyTorch and the build tools,$(PIP) torch scikit-build-core nanobind cmake ninja)
	$(call announced,Compiling the core ($(SETS) instruction sets) and installing the packages of [$(EXTRA)],\
		$(PIP) --no-build-isolation --editable ".[$(EXTRA)]" --config-settings=cmake.define.BLOCKSPARSE_SETS=$(SETS))
	touch .venv/demo $@

demo: $(if $(wildcard .venv/installed),.venv/installed,.venv/demo)
	$(BIN)/blocksparse demo

# Each of the two processes has one thread: with more, they would wait for each other. `make test-all` has all threads.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not full"

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The JAX front end with the oldest JAX that it supports, and the newest for this Python. Their packages are in folders of
# their own, not in .venv, because tests that fork fail if JAX is loaded.
JAX_oldest := jax==0.7.2
JAX_newest := jax
JAX_TESTS = $(wildcard tests/library/test_jax*.py) tests/lab/test_docs.py src/blocksparse/jax
test-jax: build/jax/oldest build/jax/newest
	for version in $(^F); do echo "JAX, $$version:"; OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/jax/$$version \
		$(BIN)/python -m pytest -n 2 --dist worksteal -m "not full" -k jax $(JAX_TESTS) || exit 1; done

build/jax/%: .venv/installed
	rm -rf $@
	$(call announced,Installing JAX ($*),$(PIP) --target $@ "$(JAX_$*)" equinox flax optax)
	touch $@

# The contract of every op on the GPU of this machine: tests that run kernels there, each compiled first. It needs no
# set-up beyond a Python with PyTorch for the GPU, pytest, pytest-xdist and hypothesis: PYTHON.
GPU_TESTS = $(wildcard tests/library/test_*.py) tests/lab/test_cuda_graph.py
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -n 14 --dist worksteal -m "gpu and not full" -o console_output_style=count --durations=8 $(GPU_TESTS)

# The site, in build/site; its tutorials run unless their results are kept from before. A warning, a broken link say, fails.
docs: setup
	$(BIN)/python -m sphinx -W --keep-going --quiet -j 2 -c docs . build/site
	@echo "The site: build/site/index.html"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/english.py
	$(BIN)/clang-format --dry-run --Werror csrc/*/* benchmarks/libxsmm/*.c

# Random calls of the compiled core against float64. A fault comes with the command that shows it again.
FUZZ_MINUTES ?= 10
FUZZ ?= --minutes $(FUZZ_MINUTES) --log build/fuzz.jsonl
fuzz: setup
	mkdir -p build
	$(BIN)/python tests/fuzz $(FUZZ)

# The same on a core of its own, built by gcc with AddressSanitizer and UndefinedBehaviorSanitizer.
SANITIZED = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1 \
	BLOCKSPARSE_FUZZ_CORE="$$(ls build/sanitize/_core*.so)"
sanitize: setup
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DBLOCKSPARSE_SANITIZE=ON -DBLOCKSPARSE_SETS=tests
	$(BIN)/cmake --build build/sanitize
	$(SANITIZED) $(BIN)/python tests/fuzz $(FUZZ)

# The source distribution, a wheel from it, and that wheel in a fresh environment without a compiler.
wheel-test: setup
	$(BIN)/python tests/wheel.py

bench: setup
	$(BIN)/python benchmarks/reach.py

bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv build dist
