"""The dtype of a model's state, which its owner may have cast.

Flax and ``jax.lax.scan`` want a variable to keep its dtype from step to step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def keep_dtype(before: Any, after: jax.Array) -> jax.Array:
    """A new value in the dtype of the one before, if that is a float.

    It is rounded to nearest, but moves at least to the next value of the dtype: a value
    that small steps move would not move at all.

    Args:
      before: the value that is stored.
      after: its next value, float32; or an integer that the dtype represents.
    """
    dtype = jnp.result_type(before)
    if dtype == after.dtype or not jnp.issubdtype(dtype, jnp.floating):
        return after
    if not jnp.issubdtype(after.dtype, jnp.floating):
        return after.astype(dtype)
    # Nothing differentiates state, and ``nextafter`` has no derivative.
    before, after = lax.stop_gradient((jnp.asarray(before), after))
    rounded = round_into(after, dtype)
    larger = after > before.astype(after.dtype)
    limit = jnp.where(larger, jnp.finfo(dtype).max, jnp.finfo(dtype).min)
    is_stuck = (rounded == before) & (after != before.astype(after.dtype))
    return jnp.where(is_stuck, jnp.nextafter(before, limit.astype(dtype)), rounded)


def round_into(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 values in another float dtype, inside its range.

    Finite values stay finite, and values other than 0 do not become 0.
    """
    to = jnp.finfo(dtype)
    # Some devices flush the subnormals of float32.
    least = max(float(to.smallest_subnormal), float(jnp.finfo(jnp.float32).tiny))
    most = min(float(to.max), float(jnp.finfo(jnp.float32).max))
    size = jnp.clip(jnp.abs(x), least, most)
    inside = jnp.where(x == 0.0, x, jnp.copysign(size, x))
    return jnp.where(jnp.isinf(x), x, inside).astype(dtype)
