"""A training step compiled for TPUs, and its estimated cycles.

``python -m examples.llama.bench compile-tpu`` adds them to the file that
``python -m fbq_jax.bench compile-tpu`` writes.  It needs libtpu, but no TPU.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.llama.bench import harness
from examples.llama.config import Config
from examples.llama.model import Llama
from examples.llama.step import make_initializer, make_optimizer, make_train_step
from fbq_jax import FallbackDot
from fbq_jax.bench import tpu, tpu_cycles

# (hidden, intermediate, layers, sequences of 2048 tokens): TinyLlama's layers, of which
# four fit into the 16 GB of a v5e.
SHAPE = 2048, 5632, 4, 4
PACKED = "fallback, 10 bits saved"


def run(path: Path) -> None:
    """Compiles the step of each name for all generations, and writes the file.

    Raises:
      ModuleNotFoundError: if libtpu is not installed.
      ResultsError: if the file cannot be written.
    """
    tpu.check_compiler()
    rows = []
    for generation in tpu_cycles.TOPOLOGIES:
        for name in (*tpu.named_recipes(), PACKED):
            print(f"compiling a step by {name} for {generation}", flush=True)
            rows.append(_row(generation, name))
    tpu.write(path, tpu_steps=rows)


def _row(generation: str, name: str) -> dict[str, Any]:
    source = tpu_cycles.Source(__name__, training_step.__name__, (name, SHAPE))
    cycles = tpu_cycles.estimate(generation, source)
    common = {"generation": generation, "what": name, "shape": SHAPE}
    return common | cycles._asdict()


def training_step(
    name: str, shape: tuple[int, int, int, int]
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step and the shapes and dtypes of its arguments.

    Norms and gates save floats, except in ``PACKED``.

    Args:
      name: ``PACKED``, or a key of ``tpu.named_recipes``.
      shape: ``(hidden, intermediate, layers, sequences)``.
    """
    hidden, intermediate, layers, sequences = shape
    recipe = tpu.named_recipes()[name.removesuffix(PACKED) or "fallback"]
    config = harness.config(
        hidden,
        intermediate,
        harness.SEQUENCE,
        layers=layers,
        vocabulary=harness.VOCABULARY,
        quantized=name == PACKED,
    )
    model = Llama(config, None if recipe is None else FallbackDot(recipe))
    optimizer, schedule = make_optimizer(Config())
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(make_initializer(model, optimizer), key, None)
    size = 1, sequences, harness.SEQUENCE + 1
    tokens = jax.ShapeDtypeStruct(size, jnp.int32)
    return make_train_step(model, optimizer, schedule), (state, tokens)
