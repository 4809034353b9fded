# Each target installs what it needs into .venv, then runs. Python compiles the modules that
# are used, which takes less time than compiling all that are installed.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# The tests install XLA's GPU compiler, which checks the CUDA libraries wherever JAX starts.
# Without an NVIDIA driver, a virtual environment skips that check.
SKIP_CHECK = import os; os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

.PHONY: train test test-tpu lint docs package

train: $(VENV)/examples
	$(BIN)/python -m examples.llama.train $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-m "not exhaustive" $(ARGS)

# With a TPU's compiler installed, JAX looks for a TPU: another virtual environment.
test-tpu:
	$(MAKE) VENV=.venv-tpu .venv-tpu/tpu .venv-tpu/examples
	.venv-tpu/bin/python -m pip install --quiet --no-compile chex hypothesis pytest
	JAX_PLATFORMS=cpu .venv-tpu/bin/python -m pytest tests/kernels/tpu/test_compiled.py \
		tests/kernels/tpu/test_meshes.py tests/examples/test_tpu.py $(ARGS)

# The linter, the formatter and the type checker.
lint: $(VENV)/test
	$(BIN)/python -m pytest -m "" tests/test_static.py

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build/html
	@echo "open $(CURDIR)/docs/_build/html/index.html"

# The wheel and the sdist, in dist/, tried in new virtual environments.
package:
	$(PYTHON) .ci/package.py

$(VENV)/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$*]'
	test -e /dev/nvidiactl || echo '$(SKIP_CHECK)' > \
		$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/no_gpu.pth
	touch $@
