# make demo     set-up, build of what it needs, then train a small sparse-attention language model on real text, quantise it, generate
# make test     set-up, build, then the tests of C++ and Python and of the installed package
# make quick    after a small change: a part of the tests, under two minutes
# make nightly  the C++ tests under AddressSanitizer and ThreadSanitizer (make test-asan, make test-tsan); kernels on the emulator under many
#               schedules (SCHEDULES times those of make test) and on views with every odd stride; the Python tests marked nightly; then the
#               fuzzer of all operators: an hour (FUZZ_SECONDS) under AddressSanitizer, a quarter of an hour on the emulated backends, an
#               hour on a GPU if there is one
# make wheel    dist/: a wheel that needs no compiler and the source archive; make release adds checksums
# make test-wheel   tries the wheel: its code for GPUs, an empty environment, a clean Debian, emulated old processors; test-wheel-torch beside two
#               PyTorch versions (gigabytes), test-sdist builds the source archive as pip does, without nvcc and with it
# make hf-kernel  dist/hf-kernel: the operators in the layout of Hugging Face's kernels package, for the PyTorch in .venv (docs/packages.md)
# make setup    tools and dependencies: Debian packages and .venv; nothing to do the second time
# make build    the library and the command (build/), the Python package (into .venv)
# make bench    every operator's benchmark against this machine's ceilings and torch, recorded under build/benchmarks
# make bench-check   a fresh run against the committed records of this device, by shares of the ceiling (docs/comparisons.md)
# make docs     the site of documents, build/docs/html; make test-docs opens it in a browser
# make hooks    quick checks before every commit (.pre-commit-config.yaml)
# make format, make lint, make clean

SHELL := /bin/bash
PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)
# With a CUDA compiler the CUDA backends are built too; a GPU is only needed to run them.
PRESET ?= $(if $(shell command -v nvcc),cuda,cpu)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python keeps the modules that it compiles, also where the environment says otherwise: setup.sh leaves them to the first import,
# and each process of a test would compile PyTorch's 900 again, for 2 to 4 s.
export PYTHONDONTWRITEBYTECODE :=

# What `make demo` leaves out of a first build, and any `make build` then adds in the same folder: the command, the tests, the
# emulated GPUs and, where there is no NVIDIA device, kernels for one.
GPU ?= $(wildcard /dev/nvidia[0-9]*)
# Without a device `make test` compiles each kernel for one architecture only, and without optimisation. Any other `make build`, and
# `make nightly`, compiles all of it, and a spill is an error.
COMPILE_ONLY := OFF
test test-cpp test-python test-install: COMPILE_ONLY = $(if $(GPU),OFF,ON)
LEAN := -DHOPWELL_BUILD_CLI=OFF -DHOPWELL_BUILD_TESTS=OFF -DHOPWELL_EMULATOR=OFF $(if $(GPU),,-DHOPWELL_CUDA=OFF)
COMMAND_ALONE := -DHOPWELL_BUILD_TESTS=OFF -DHOPWELL_BUILD_PYTHON=OFF -DHOPWELL_EMULATOR=OFF -DHOPWELL_CUDA=OFF
# pip packages what CMake has built: its folder is CMake's, and nothing but the module is left to compile there.
INSTALL_PACKAGE := $(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --config-settings build-dir=build/$(PRESET) .

.PHONY: demo test quick setup packages environment build compile library bench bench-check docs hooks format lint clean
.PHONY: hf-kernel wheel test-wheel test-wheel-torch test-sdist release
.PHONY: nightly test-cpp test-python test-install test-asan test-tsan test-docs
.DEFAULT_GOAL := build

setup: packages environment

packages:
	@scripts/setup.sh packages

environment: packages
	@scripts/setup.sh environment

# What needs no Python is compiled while pip fetches and unpacks torch.
build: packages
	@cmake --preset $(PRESET) -DHOPWELL_COMPILE_ONLY=$(COMPILE_ONLY) --log-level=WARNING >/dev/null
	@$(MAKE) --no-print-directory --jobs 2 environment compile
	@$(INSTALL_PACKAGE)

compile: packages
	@cmake --build --preset $(PRESET) --parallel $(JOBS)

library: packages
	@[ -e build/$(PRESET)/CMakeCache.txt ] || cmake --preset $(PRESET) $(LEAN) --log-level=WARNING >/dev/null
	@cmake --build --preset $(PRESET) --parallel $(JOBS) --target hopwell

demo:
	@echo "make demo: set-up and build first, some minutes the first time; then the demo itself, about 4 minutes on two idle cores"
	@$(MAKE) --no-print-directory --jobs 2 environment library
	@$(INSTALL_PACKAGE)
	@$(PYTHON) examples/train_dsa_lm.py --name demo

# The tests of C++, in two processes, run beside the tests of Python, in one: on two cores they end after 10 and 14 minutes. The sub-make
# does not build again.
WORKERS = $(if $(filter 1,$(JOBS)),1,2)
test: build
	@$(MAKE) --no-print-directory --jobs 2 BUILT=1 PYTHON_WORKERS=1 test-cpp test-python test-install
	@echo "All tests passed."

# After a small change: a few cases of each operator and backend under the emulator's checker, the tests of plans, arguments and entry
# points, and the linters that take seconds. It leaves out the long cases, Python, and nvcc.
QUICK := -*OperatorCase*:*OutOfMemory*:*SameBits*:Large*:*Interrupt*:*Fork*
quick: setup
	@cmake --preset cpu --log-level=WARNING >/dev/null
	@cmake --build --preset cpu --parallel $(JOBS) --target hopwell_cli hopwell_tests
	@build/cpu/tests/hopwell_tests --gtest_brief=1 --gtest_filter='$(QUICK)'
	@build/cpu/hopwell check --quick
	@.venv/bin/ruff check --quiet . && $(PYTHON) scripts/plain.py

test-cpp: $(if $(BUILT),,build)
	@ctest --preset $(PRESET) --parallel $(WORKERS)
	@echo "Skipped:"; grep -aE '^\[  SKIPPED \] [^ ]+$$' build/$(PRESET)/Testing/Temporary/LastTest.log | sort -u || true

test-python: $(if $(BUILT),,build)
	@$(PYTHON) -m pytest --numprocesses $(or $(PYTHON_WORKERS),$(WORKERS)) --dist loadfile

test-install: $(if $(BUILT),,build)
	@tests/install/run.sh build/$(PRESET)

# The C++ tests once more under the sanitizers: memory and undefined behaviour, and data races. In a few processes for each core, so
# that none has much left when another has ended.
test-asan test-tsan: test-%: setup
	@cmake --preset $* --log-level=WARNING >/dev/null
	@cmake --build --preset $* --parallel $(JOBS) --target hopwell_tests
	@shards=$$((6 * $(JOBS))); seq 0 $$((shards - 1)) | GTEST_TOTAL_SHARDS=$$shards xargs -P $(JOBS) -I{} env GTEST_SHARD_INDEX={} build/$*/tests/hopwell_tests --gtest_brief=1

# The fuzzer for an hour, with the library and the module under AddressSanitizer, which must be loaded before Python; then on emulated
# GPUs and on a real one, whose summaries are build/fuzz-*.json.
FUZZ_SECONDS ?= 3600
FUZZ_SEED ?= $(shell date +%s)
SCHEDULES ?= 10
nightly: build test-asan test-tsan
	@HOPWELL_EMULATOR_SCHEDULES=$(SCHEDULES) ctest --preset $(PRESET) --timeout 36000 \
	  --tests-regex '(Kernels|Operators).Right|arch_planted_bugs'
	@for target in $$(sed -n 's/^set(HOPWELL_TARGETS \(.*\))/\1/p' cmake/targets.cmake); do build/$(PRESET)/hopwell check --backend emu:$$target --seeds $(SCHEDULES) --nightly || exit 1; done
	@VIEWS_DRAWS=1000 $(PYTHON) -m pytest -q tests/python/test_views.py
	@HOPWELL_NIGHTLY=1 $(PYTHON) -m pytest -q -m nightly
	@cmake --preset asan --log-level=WARNING >/dev/null
	@cmake --build --preset asan --parallel $(JOBS) --target hopwell_python
	@rm -rf build/asan/package && mkdir -p build/asan/package && cp -rL build/asan/generated/python/hopwell build/asan/package
	@cp build/asan/bindings/python/_hopwell.*.so build/asan/package/hopwell
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  PYTHONPATH=build/asan/package FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) $(PYTHON) -m pytest -p no:cacheprovider tests/python/test_fuzz.py
	@FUZZ="env PYTHONPATH=tests/python FUZZ_SEED=$(FUZZ_SEED) $(PYTHON) -m fuzz"; \
	FUZZ_SECONDS=$$(($(FUZZ_SECONDS) / 4)) $$FUZZ --backends emulated --report build/fuzz-emulated.json; emulated=$$?; \
	FUZZ_SECONDS=$(FUZZ_SECONDS) $$FUZZ --backends gpus --report build/fuzz-gpus.json && exit $$emulated

# WHEEL_PYTHON: the wheel of Python 3.12 or later serves all of these.
WHEEL_PYTHON ?= python3
wheel: packages
	@scripts/wheel.sh $(WHEEL_PYTHON)

test-wheel: wheel
	@scripts/setup.sh packages debootstrap qemu-user-static
	@tests/wheel/run.sh dist/*.whl $(WHEEL_PYTHON)

test-wheel-torch: wheel
	@tests/wheel/torch_versions.sh dist/*.whl $(WHEEL_PYTHON)

test-sdist: wheel
	@tests/wheel/source_archive.sh dist/*.tar.gz $(WHEEL_PYTHON)

release: test-wheel test-sdist
	@scripts/release.sh

hf-kernel: build
	@rm -rf dist/hf-kernel && $(PYTHON) scripts/hf_kernel.py dist/hf-kernel

bench: build
	@$(PYTHON) benchmarks/cpu.py

# OPERATORS: some of them. On a device that no record is of nothing is compared, and it fails with status 3.
bench-check: build
	@$(PYTHON) -m hopwell.bench $(OPERATORS) --check benchmarks/results/*/peers*.json

# The Python reference is made of docstrings, the C++ one of the headers. The command is compiled without kernels, because pages show its
# lists. The tutorial's kernels are compiled with the emulator, because a page shows what they do. Any warning is an error.
docs: setup
	@cmake --preset cpu -B build/command $(COMMAND_ALONE) --log-level=WARNING >/dev/null
	@cmake --build build/command --parallel $(JOBS) --target hopwell_cli
	@scripts/setup.sh packages doxygen
	@scripts/setup.sh documents
	@HOPWELL_COMMAND=build/command/hopwell $(PYTHON) -m sphinx -b html -E -W --keep-going -j auto docs build/docs/html
	@echo "open build/docs/html/index.html"

test-docs: docs
	@scripts/setup.sh packages chromium fonts-dejavu-core
	@$(PYTHON) -m pytest -p no:cacheprovider tests/docs

format: setup
	@git ls-files '*.cpp' '*.hpp' '*.h' '*.cu' | xargs .venv/bin/clang-format -i
	@.venv/bin/ruff format --quiet . && .venv/bin/ruff check --quiet --fix .

hooks: setup
	@$(PYTHON) -m pip install --quiet pre-commit==4.7.0
	@.venv/bin/pre-commit install

GENERATED := $(addprefix build/declared/python/hopwell/,_operators.py _reference.py _torch_ops.py _hopwell.pyi)
lint: build
	@git ls-files '*.cpp' '*.hpp' '*.h' '*.cu' | xargs .venv/bin/clang-format --dry-run --Werror
	@$(PYTHON) -B scripts/declare --write build/declared
	@.venv/bin/ruff check . $(GENERATED) && .venv/bin/ruff format --check . $(GENERATED) && .venv/bin/mypy
	@git ls-files -- ':!*.json' ':!*.svg' | xargs .venv/bin/codespell
	@$(PYTHON) scripts/plain.py
	@git ls-files 'src/*.cpp' 'cases/*.cpp' | xargs .venv/bin/clang-tidy -p build/$(PRESET) --extra-arg=-Wno-ignored-gch --quiet

clean:
	@rm -rf build dist
