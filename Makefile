# Two commands, each with its own set-up: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# The tests bring XLA's compiler for GPUs, which asks for CUDA's libraries; where there
# is no driver none are needed.
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK ?= $(if $(wildcard /dev/nvidiactl),,1)

.PHONY: train test

train: $(VENV)/examples
	$(BIN)/python -m examples.llama.train $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

$(VENV)/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@
