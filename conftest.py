"""Strict settings for every test: eight fake devices, no implicit promotion."""

import atexit
import gc
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

# JAX reads the flags once, when its first backend starts.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Compilation takes most of the tests' time.
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",  # Other cores run other tests.
        # The new emitters take twice as long for small programs. Later versions of
        # jaxlib have no other emitters and no such flag. The others of 0.9 round casts
        # to FP8 wrongly.
        "--xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
    ]
)
# The number of XLA's threads: those of an interpreted cluster must all run at once.
os.environ["NPROC"] = "16"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Workers and the programs that tests start share compiled programs.
    compiled = tempfile.TemporaryDirectory(prefix="fbq-jax-compiled-")
    atexit.register(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# XLA's GPU compiler may be installed without the CUDA libraries.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects and few cycles of them.
gc.set_threshold(50_000, 10, 10)

ROOT = Path(__file__).parent
# Modules with the longest examples in docstrings, whose functions have fast tests.
LONGEST = {
    ROOT / "examples/llama/model.py",
    ROOT / "fbq_jax/experts/ragged_dot.py",
    ROOT / "fbq_jax/int8_flow/blocks.py",
    ROOT / "fbq_jax/linen/choosing.py",
    ROOT / "fbq_jax/linen/freezing.py",
    ROOT / "fbq_jax/linen/int8_flow.py",
    ROOT / "fbq_jax/linen/step_codes.py",
    ROOT / "fbq_jax/nnx/freezing.py",
    ROOT / "fbq_jax/nnx/int8_flow.py",
    ROOT / "fbq_jax/nnx/step_codes.py",
    ROOT / "fbq_jax/testing.py",
}
NO_GPU = "needs a GPU"
FILES = pytest.StashKey[int]()  # how many are done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the longest examples in docstrings."""
    for item in items:
        if item.path in LONGEST:
            item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish() -> None:
    """Spares the garbage collector all modules: they stay as long as the tests."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked ``gpu`` on a machine without a GPU."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(NO_GPU)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets compiled programs now and then: each takes longer among many others."""
    if nextitem is not None and nextitem.path != item.path:
        item.session.stash[FILES] = item.session.stash.get(FILES, 0) + 1
        if item.session.stash[FILES] % 10 == 0:
            jax.clear_caches()
            gc.collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports how many tests were skipped for lack of a GPU."""
    reasons = [report.longrepr for report in terminalreporter.getreports("skipped")]
    without = sum(NO_GPU in str(reason) for reason in reasons)
    if without:
        terminalreporter.write_line(f"GPU tests: {without} skipped (no GPU)")
