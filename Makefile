# make demo     set-up, build, then train a small sparse-attention language model on real text, quantise it, generate with it
# make test     set-up, build, then every test there is for this machine
# make setup    tools and dependencies: Debian packages and .venv; nothing to do the second time
# make build    the library and the command (build/), the Python package (into .venv)
# make bench    every operator's benchmark against this machine's ceilings and torch, recorded under build/benchmarks
# make docs, make format, make lint, make clean

SHELL := /bin/bash
PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)
# With a CUDA compiler the CUDA backends are built too; a GPU is only needed to run them.
PRESET ?= $(if $(shell command -v nvcc),cuda,cpu)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# torch and the library each bring an OpenMP runtime: threads of one that spin while they wait hold up those of the other.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test setup build bench docs format lint clean test-cpp test-python test-install test-asan test-tsan
.DEFAULT_GOAL := build

setup:
	@scripts/setup.sh

build: setup
	@cmake --preset $(PRESET) --log-level=WARNING >/dev/null
	@cmake --build --preset $(PRESET) --parallel $(JOBS)
	@$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps .

demo: build
	@$(PYTHON) examples/train_dsa_lm.py --name demo

test: test-cpp test-python test-install test-asan test-tsan
	@echo "All tests passed."

test-cpp: build
	@ctest --preset $(PRESET)

test-python: build
	@$(PYTHON) -m pytest --numprocesses 2

test-install: build
	@tests/install/run.sh build/$(PRESET)

# The C++ tests once more under the sanitizers: memory and undefined behaviour, and data races. In one process: a process a test,
# as ctest has it, spends most of its time on ThreadSanitizer's start.
test-asan test-tsan: test-%: setup
	@cmake --preset $* --log-level=WARNING >/dev/null
	@cmake --build --preset $* --parallel $(JOBS)
	@build/$*/tests/hopwell_tests --gtest_brief=1

bench: build
	@$(PYTHON) benchmarks/cpu.py

docs: build
	@.venv/bin/pdoc --output-directory build/docs hopwell && echo "open build/docs/index.html"

format: setup
	@git ls-files '*.cpp' '*.hpp' '*.h' '*.cu' | xargs .venv/bin/clang-format -i
	@.venv/bin/ruff format --quiet . && .venv/bin/ruff check --quiet --fix .

lint: build
	@git ls-files '*.cpp' '*.hpp' '*.h' '*.cu' | xargs .venv/bin/clang-format --dry-run --Werror
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
	@git ls-files 'src/*.cpp' 'cases/*.cpp' | xargs .venv/bin/clang-tidy -p build/$(PRESET) --quiet

clean:
	@rm -rf build dist
