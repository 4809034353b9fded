"""The products that this library is compared with: bf16 and other libraries."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fbq_jax.bench.matmuls import MATMUL, Matmul


def bf16() -> Matmul:
    """XLA's product in the dtype of the operands."""
    return Matmul("bf16", "xla", lambda x, w, *_: lax.dot_general(x, w, MATMUL))


def flax_fp8(x: jax.Array, w: jax.Array) -> Matmul:
    """Flax's FP8 product: one scale per tensor, from the maxima of earlier steps."""
    op = nn.Fp8DotGeneral()
    state = op.init(jax.random.key(0), x, w, MATMUL)

    def product(x: jax.Array, w: jax.Array, state: Any, _: Any) -> jax.Array:
        y = op.apply(state, x, w, MATMUL)
        assert isinstance(y, jax.Array)
        return y

    return Matmul("Flax Fp8DotGeneral", "xla", product, state=state)


def installed_int8_libraries() -> Iterator[Matmul]:
    """Qwix and AQT where they are installed; stderr names the missing ones."""
    for library in (_qwix_int8, _aqt_int8):
        try:
            yield library()
        except ImportError as error:
            print(f"without {library.__name__[1:]}: {error}", file=sys.stderr)


def _qwix_int8() -> Matmul:
    """Qwix: INT8 in all three products, a scale per channel, nearest rounding."""
    qwix = importlib.import_module("qwix._src.core.dot_general_qt")
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=jnp.int8,
        dlhs_grad_qtype=jnp.int8,
        drhs_grad_qtype=jnp.int8,
    )

    def product(x: jax.Array, w: jax.Array, *_: Any) -> jax.Array:
        return qwix.dot_general_qt(x, w, MATMUL, config)

    return Matmul("Qwix INT8", "xla", product)


def _aqt_int8() -> Matmul:
    """AQT: INT8 in all three products, stochastic rounding of the gradients."""
    config = importlib.import_module("aqt.jax.v2.config")
    int8 = config.fully_quantized(fwd_bits=8, bwd_bits=8)

    def product(x: jax.Array, w: jax.Array, _: Any, key: jax.Array) -> jax.Array:
        return config.set_context(int8, key, train_step=None)(x, w, MATMUL)

    return Matmul("AQT INT8", "xla", product, inputs=jax.random.key(1))
