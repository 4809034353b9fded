# `make train` and `make test` install what they need into .venv, then run.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# The tests install XLA's GPU compiler, which checks the CUDA libraries. Without an NVIDIA
# driver, skip that check.
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK ?= $(if $(wildcard /dev/nvidiactl),,1)

.PHONY: train test

train: $(VENV)/examples
	$(BIN)/python -m examples.llama.train $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-m "not exhaustive" $(ARGS)

$(VENV)/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@
