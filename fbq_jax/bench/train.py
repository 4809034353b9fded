"""A whole optimizer step of a Llama of a billion parameters, in bf16 and by recipe."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from fbq_jax.bench import llama, measure
from fbq_jax.bench.block import SEQUENCE, choose
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row

# (hidden, intermediate, layers, sequences of 2048 tokens): TinyLlama's 1.1 billion
# parameters, and as many in layers as wide as those of Llama 3's 8 billion.
SHAPES = ((2048, 5632, 22, 8), (4096, 14336, 4, 8))
_STEPS = 8  # before anything is compared or timed
# By what INT8 may then differ from bf16: nats, and the share of the gradient's norm.
_LIMITS = {"loss": 0.02, "grad_norm": 0.1}


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures each ``(hidden, intermediate, layers, sequences)``.

    A step is that of ``examples/llama``: AdamW on float32 weights.  Its batch is the
    same random tokens each time.  The work counted is that of the matrix products and
    of causal attention.

    Raises:
      WrongResultError: if the loss or the gradient's norm is not bf16's.
    """
    for shape in shapes:
        hidden, intermediate, layers, sequences = shape
        sequence = min(SEQUENCE, hidden)
        tokens = jnp.asarray(llama.random_tokens(sequences, sequence))
        baseline: Row | None = None
        exact: dict[str, float] = {}
        for name, recipe in llama.recipes().items():
            by, dot_general = choose(recipe, implementation)
            config = llama.config(
                hidden,
                intermediate,
                sequence,
                layers=layers,
                vocabulary=llama.VOCABULARY,
                quantized=recipe is not None,
            )
            trained = llama.train(
                config, dot_general, tokens, steps=_STEPS, effort=effort
            )
            got = {of: float(trained.metrics[of]) for of in _LIMITS}
            exact = exact or got
            errors = {of: abs(got[of] - exact[of]) for of in _LIMITS}
            errors["grad_norm"] /= exact["grad_norm"]
            for of, limit in _LIMITS.items():
                measure.require(errors[of], limit, f"{of} of {name} at {shape}")
            measured = row(
                trained.timing,
                llama.work(config, sequences * sequence),
                baseline,
                what=name,
                implementation=by,
                shape=shape,
                fallback=trained.fallback,
                errors=errors,
                compile_s=trained.compile_s,
                peak_bytes=trained.peak_bytes,
            )
            baseline = baseline or measured
            yield measured
