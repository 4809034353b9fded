"""What quantization does to a layer's three products."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.choice.recording import Operands
from fbq_jax.core.dot_general import dot_general
from fbq_jax.recipes.schema import Recipe

_DIMENSIONS = ((2,), (1,)), ((0,), (0,))
_BLOCK = 128
#: A block is an outlier if its largest magnitude is so many times the median block's.
OUTLIER = 8.0


class Errors(NamedTuple):
    """Relative errors of the products of a layer, in the Frobenius norm.

    Attributes:
      y: of the output.
      dx: of the activation's gradient.
      dw: of the weight's gradient.
    """

    y: float
    dx: float
    dw: float


class Outliers(NamedTuple):
    """What stands out in an activation.

    Attributes:
      largest: the largest magnitude, over the root mean square.
      share: the share of 128x128 blocks whose largest magnitude is more than
        ``OUTLIER`` times the median block's.
    """

    largest: float
    share: float


def errors(operands: Operands, recipe: Recipe) -> Errors:
    """The errors of a recipe against float32 products of the same operands.

    The threshold of fallback is the quantile of the operands' own blocks.
    """
    measured = _errors(operands.x, operands.w, operands.dy, recipe)
    return Errors(*map(float, jax.device_get(measured)))


@functools.partial(jax.jit, static_argnums=3)
def _errors(
    x: jax.Array, w: jax.Array, dy: jax.Array, recipe: Recipe
) -> tuple[jax.Array, ...]:
    def quantized(x: jax.Array, w: jax.Array) -> jax.Array:
        y, _ = dot_general(
            *(x, w, _DIMENSIONS),
            preferred_element_type=dy.dtype,
            recipe=recipe,
            key=jax.random.key(0),
        )
        return y

    def exact(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, _DIMENSIONS, precision=lax.Precision.HIGHEST)

    wide = [a.astype(jnp.float32) for a in (x, w, dy)]
    found = []
    for product, (x_, w_, dy_) in ((quantized, (x, w, dy)), (exact, wide)):
        y, gradients = jax.vjp(product, x_, w_)
        found.append((y, *gradients(dy_)))
    return tuple(_relative(a, b) for a, b in zip(*found, strict=True))


def _relative(actual: jax.Array, exact: jax.Array) -> jax.Array:
    norm = jnp.linalg.norm(exact.ravel())
    difference = jnp.linalg.norm((actual.astype(jnp.float32) - exact).ravel())
    return jnp.where(norm > 0, difference / norm, 0.0)


def outliers(operands: Operands) -> Outliers:
    """The outliers of X."""
    return Outliers(*map(float, jax.device_get(_outliers(operands.x))))


@jax.jit
def _outliers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    size = jnp.abs(x.astype(jnp.float32))
    missing = [(0, 0)] + [(0, -side % _BLOCK) for side in x.shape[1:]]
    blocks = jnp.pad(size, missing)
    batch, rows, columns = blocks.shape
    blocks = blocks.reshape(batch, rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    blocks = blocks.max(axis=(2, 4))
    rms = jnp.sqrt(jnp.mean(jnp.square(size)))
    share = jnp.mean(blocks > OUTLIER * jnp.median(blocks))
    return size.max() / jnp.maximum(rms, jnp.finfo(jnp.float32).tiny), share
