# RaggedKV: `make demo` and `make test` are all a fresh machine needs.
SHELL := bash
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
PYTEST_ARGS ?=

# Two threads fighting for one core cost far more than they bring; a server sets its own.
export OMP_NUM_THREADS ?= 1
export PYTHON

# A bare GPU machine has no virtual environment, and cannot make one.
GPU_PY = $(if $(wildcard $(PY)),$(PY),$(PYTHON))
GPU_CHECK_ARGS ?=

.PHONY: help env demo test test-all gpu-check gpu-check-bundle lint format wheel lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

env: ## create the virtual environment (VENV=.venv), or reuse it when the lock is unchanged
	@.ci/env $(VENV)

demo: env ## fetch the default model and compare stock SGLang with RaggedKV
	@$(PY) -m loadtest model
	@$(PY) -m loadtest demo

test: env ## run the tests (but slow ones and those for a GPU)
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: env ## run every test that this machine can run
	$(PY) -m pytest $(PYTEST_ARGS)

gpu-check: ## test and benchmark the kernels on a CUDA GPU (8 minutes; results in out/gpu-check)
	@$(GPU_PY) -m flashinfer_ext.gpu_check $(GPU_CHECK_ARGS)

gpu-check-bundle: env ## collect what gpu-check needs on a GPU machine without a network
	@$(PY) -m flashinfer_ext.gpu_check --make-bundle $(GPU_CHECK_ARGS)

lint: env ## check style with ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: env ## reformat with ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: env ## build the wheel into dist/
	@rm -rf build
	$(PY) -m build --wheel
	@rm -rf build

lock: ## write constraints.txt from what is installed in VENV
	@.ci/lock $(VENV)

clean: ## remove build output and caches (not the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
