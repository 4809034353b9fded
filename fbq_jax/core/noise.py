"""The seeds of a call's noise."""

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.rounding import (
    CallSeed,
    MatrixSeeds,
    Seeds,
    fold,
    fold_seeds,
)

# The independent noise streams of one call.
LHS_STREAM, RHS_STREAM, GRAD_STREAM, SUM_STREAM = range(4)


def seeds_of(seed: CallSeed, stream: int, indices: jax.Array) -> Seeds:
    """The seeds of matrices or tiles in one of a call's streams of noise.

    Args:
      seed: of the call.
      stream: one of the streams above.
      indices: int32, the index of each matrix or tile.
    """
    indices = indices.astype(jnp.uint32)
    if not isinstance(seed, tuple):
        return fold(fold(seed, stream), indices)
    layer, calls, not_earlier = (jnp.broadcast_to(x, indices.shape) for x in seed)
    place = indices << 3 | jnp.uint32(stream << 1) | not_earlier
    return MatrixSeeds(layer, calls, place)


def frozen_seed(seed: CallSeed, dy: jax.Array) -> jax.Array:
    """The seed of the gradient's noise in a frozen layer, uint32 ``[]``.

    The state of such a layer, and so its seed, is the same in every step.  So the bits
    of dY, the gradient of its output, seed the noise as well.
    """
    bits = lax.bitcast_convert_type(dy.astype(jnp.float32), jnp.uint32)
    return fold(fold_seeds(seed), jnp.sum(bits, dtype=jnp.uint32))
