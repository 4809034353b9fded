"""Times the first call of a training step, each in a process of its own.

    python -m experiments.bench.first_calls --out FILE

A step of 1 and of 12 equal layers runs twice: with the caches of JAX, Triton and the
CUDA driver empty, and in a second process that finds them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from fbq_jax.bench import layers, results, step

SHAPE = (8192, 2048, 2048)  # tokens, D, F
LAYERS = (1, 12)
RECIPES = ("bf16", "fallback")
CACHES = "JAX_COMPILATION_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"


def first_call(recipe: str, depth: int) -> float:
    """The seconds from the call of a step to its result, on a GPU that is ready."""
    if recipe == "bf16":
        stack = layers.bf16(depth)
    else:
        (stack,) = layers.linen(depth, None, [recipe])
    x, key = jax.block_until_ready(step.inputs(SHAPE))
    state = jax.block_until_ready(stack.start(step.kernels(SHAPE, depth)))
    program = jax.jit(layers.training_step, static_argnums=0, donate_argnums=1)
    start = time.perf_counter()
    jax.block_until_ready(program(stack, state, x, key))
    return time.perf_counter() - start


def rows() -> Iterator[dict[str, Any]]:
    """The seconds of each recipe and number of layers."""
    for recipe in RECIPES:
        for depth in LAYERS:
            with tempfile.TemporaryDirectory() as folder:
                empty, full = (_in_process(folder, recipe, depth) for _ in range(2))
            yield {
                "what": recipe,
                "layers": depth,
                "caches_empty_s": empty,
                "second_process_s": full,
            }


def _in_process(folder: str, *arguments: object) -> float:
    caches = {name: str(Path(folder, name)) for name in CACHES}
    command = [sys.executable, "-m", __spec__.name, *map(str, arguments)]
    run = subprocess.run(
        command, env=os.environ | caches, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(run.stdout)


def main() -> None:
    """Measures all, or in a process of its own, one."""
    parser = argparse.ArgumentParser(prog="experiments.bench.first_calls")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("one", nargs="*", metavar="RECIPE LAYERS")
    options = parser.parse_args()
    if options.one:
        recipe, depth = options.one
        print(first_call(recipe, int(depth)))
        return
    found = []
    for row in rows():
        print(json.dumps(row), flush=True)
        found.append(row)
    if options.out:  # JAX takes the GPU only now.
        content = results.section([], quick=False) | {"shape": SHAPE, "rows": found}
        results.merge(options.out, "first_calls", content)


if __name__ == "__main__":
    main()
