# Everything runs in .venv, which is made on first use and again when the pins change.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-most test-bits test-slow test-matrix lint bench bench-full table kernels gpu-check gpu-bench clean
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-installed
TOOLS := $(VENV)/.tools-installed
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
# The first of these that is new enough makes .venv; `make PYTHON=... test` names another.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' Makefile | while IFS=: read -r name what; do \
		printf '  make %-12s%s\n' "$$name" "$$what"; done

demo: $(RUNTIME)  ## complete real code prompts with the built-in checkpoint, and compare
	@$(BIN)/layerskip demo

# On numbers this small, tests are quicker side by side with a thread each than one by one with
# more. Bits are looked at with all threads, as users have them, beside the others: what is said of
# them comes when they end. Their threads wait asleep: to wait costs nobody a core.
BITS := tests/test_bits.py tests/test_model.py
BITS_LOG := .cache/test-bits.log
# Where the environment forbids bytecode, each of dozens of processes compiles all modules anew.
test-most test-bits test-slow: export PYTHONDONTWRITEBYTECODE =
# Tests compare with what a CPU does: "auto" must not find a GPU. `make gpu-check` looks for one, and
# `pytest tests/kernels -k cuda` has the kernels' tests there.
test-most test-bits test-slow: export CUDA_VISIBLE_DEVICES =
test: $(TOOLS)  ## the tests, but for the slow ones
	@$(MAKE) --jobs 2 test-most test-bits

test-most: $(TOOLS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile \
		$(addprefix --ignore ,$(BITS))

test-bits: $(TOOLS)
	@mkdir -p $(dir $(BITS_LOG))
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q $(BITS) >$(BITS_LOG) 2>&1; \
		status=$$?; cat $(BITS_LOG); exit $$status

test-slow: $(TOOLS)  ## the slow tests alone
	@$(BIN)/python -m pytest -q -m slow

test-matrix: | $(BIN)/python  ## wheel and sdist, tested in clean environments: an hour or more
	@$(BIN)/python bench/installs.py $(ARGS)

lint: $(TOOLS)  ## formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# A run writes beside the result files, and replaces one only when it is whole.
RESULTS := bench/results
PART := .cache/bench
CELLS := $(BIN)/python -m pytest bench --benchmark-only -q
bench: $(TOOLS)  ## the benchmarks, twelve cells: 15 minutes; JSON, plots, the README's tables
	@mkdir -p $(PART)
	@$(CELLS) --benchmark-json=$(PART)/bench.json $(ARGS)
ifeq ($(strip $(ARGS)),)
	@mv $(PART)/bench.json $(RESULTS)/bench.json
	@$(BIN)/python bench/plots.py
	@$(BIN)/python bench/readme.py
else
	@echo "With ARGS it is no record: it is in $(PART)/bench.json, and $(RESULTS)/bench.json stays."
endif

bench-full: $(TOOLS)  ## the whole matrix, exactness and scaling: hours; goes on where it was stopped
	@mkdir -p $(PART) runs
	@$(CELLS) --matrix full --resume runs/bench-full.jsonl \
		--benchmark-json=$(PART)/bench-full.json $(ARGS)
	@$(BIN)/python bench/exactness_table.py --resume runs/bench-exactness.jsonl
	@$(BIN)/python bench/scaling.py --out $(PART)/scaling.json
	@mv $(PART)/scaling.json $(RESULTS)/scaling.json
	@$(BIN)/python -m json.tool --compact $(PART)/bench-full.json $(PART)/compact.json
	@mv $(PART)/compact.json $(RESULTS)/bench-full.json
	@rm -f runs/bench-full.jsonl runs/bench-exactness.jsonl
	@$(BIN)/python bench/plots.py
	@$(BIN)/python bench/readme.py

table: $(TOOLS)  ## write the README's table of architectures again
	@$(BIN)/python tests/test_architectures.py

kernels: $(TOOLS)  ## compile the CUDA kernels for all architectures; no GPU needed
	@$(BIN)/python -m layerskip.ops build --arch sm_80,sm_86,sm_89,sm_90,sm_100

# In the Python of the machine with the GPU, where CUDA's torch is: nothing gets installed.
GPU_PYTHON ?= python3
HAS_TORCH = $(GPU_PYTHON) -c 'import torch' 2>/dev/null || { echo "$(GPU_PYTHON) has no torch;" \
	"name a Python that has: make GPU_PYTHON=/path/to/python $@" >&2; exit 1; }
gpu-check:  ## on a machine with a GPU: bits, errors and bandwidth of every kernel
	@$(HAS_TORCH)
	@$(GPU_PYTHON) bench/gpu_check.py $(ARGS)

gpu-bench:  ## on a machine with a GPU: speed of decoding, 9 minutes; ARGS="--sections plain,rounds"
	@$(HAS_TORCH)
	@$(GPU_PYTHON) bench/gpu_bench.py $(ARGS)

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) dist build .benchmarks .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find layerskip recipes tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "layerskip needs Python 3.11 or later:" \
		"install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "layerskip needs" \
		"Python 3.11 or later, and $(PYTHON) is not." >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Python's venv module does not work here" \
		"(on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }

# torch goes in by itself, so that nothing else decides which build of it is taken.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch and transformers (once; a minute or more)."
	@$(PIP) install "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(TOOLS): $(RUNTIME)
	@echo "Installing the tools for tests, lint, benchmarks and recipes (once)."
	@$(PIP) install -c constraints.txt -e '.[dev,test,bench,recipes]'
	@touch $@
