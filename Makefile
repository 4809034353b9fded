# `make train`, `make test` and `make docs` install what they need into .venv, then run.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# The tests install XLA's GPU compiler, which checks the CUDA libraries. Without an NVIDIA
# driver, skip that check.
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK ?= $(if $(wildcard /dev/nvidiactl),,1)

.PHONY: train test docs

train: $(VENV)/examples
	$(BIN)/python -m examples.llama.train $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-m "not exhaustive" $(ARGS)

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build/html

$(VENV)/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@
