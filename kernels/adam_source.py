"""A weight after a step of AdamW, as a source of ``quantize``.

A layer's products are the only readers of a weight between two steps.  One kernel
therefore updates a weight and quantizes it: it reads the gradient, the weight and the
moments once, and the step after it reads codes.  With the gradient ``g``, the weight
``w`` and ``t`` steps so far, in float32:

    m' = b1 m + (1 - b1) g        u = (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps)
    v' = b2 v + (1 - b2) g^2      w' = w - rate (u + decay w)

The codes are of ``w'``, rounded to the dtype of the products.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.kernels.layer_sources import join_gate_up
from fbq_jax.kernels.packing import GROUP
from fbq_jax.kernels.sources import Shape


class AdamWeight(NamedTuple):
    """A weight and its moments, of one shape.

    Attributes:
      weight: float32 or bfloat16.
      mu: the first moments, float32.
      nu: the second moments, float32.
    """

    weight: jax.Array
    mu: jax.Array
    nu: jax.Array


class AdamScalars(NamedTuple):
    """The numbers of a step, float32 ``[]``.

    Attributes:
      rate: the learning rate.
      decay: the weight decay.
      mu_bias: ``1 - b1^t``.
      nu_bias: ``1 - b2^t``.
      grad_scale: a factor of the gradient, as of clipping.
    """

    rate: jax.Array
    decay: jax.Array
    mu_bias: jax.Array
    nu_bias: jax.Array
    grad_scale: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "state", "scalars"],
    meta_fields=["b1", "b2", "eps", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Adam:
    """Weights ``[B, K, N]`` after a step.  It saves their new ``AdamWeight``.

    The weights of gate and up are ``[B, K, 2, F]``, which the products read as
    ``join_gate_up`` joins them.

    Attributes:
      values: the gradient, bfloat16, float16 or float32, of the weights' shape.
      state: the weights and their moments.
      scalars: ``AdamScalars`` as float32 ``[B, 5]``.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      dtype: the dtype of the products with the weight.
    """

    values: jax.Array
    state: AdamWeight
    scalars: jax.Array
    b1: float
    b2: float
    eps: float
    dtype: jax.typing.DTypeLike

    @property
    def row_counts(self) -> None:
        """None: all rows count."""
        return None

    @property
    def interleaved(self) -> bool:
        """Whether the products read gate and up in turns of ``GROUP`` columns."""
        return self.values.ndim == 4 and self.values.shape[3] % GROUP == 0

    @property
    def shape(self) -> Shape:
        """The shape ``(B, K, N)``."""
        batch, rows, *columns = self.values.shape
        return batch, rows, math.prod(columns)

    def compute(self) -> tuple[jax.Array, AdamWeight]:
        """The weights in the dtype of the products, and the new state."""
        ones = (1,) * (self.values.ndim - 1)
        scalars = AdamScalars(
            *self.scalars.T.reshape(-1, *self.scalars.shape[:1], *ones)
        )
        new = update(self.values, self.state, scalars, self.b1, self.b2, self.eps)
        weight = new.weight.astype(self.dtype)
        if weight.ndim == 4:
            weight = join_gate_up(weight[:, :, 0], weight[:, :, 1])
        return weight, new


def kernel_scalars(source: Adam) -> jax.Array:
    """All numbers of a source as a kernel reads them, float32 ``[B, 10]``.

    After those of ``AdamScalars`` come b1, 1 - b1, b2, 1 - b2 and eps.
    """
    b1, b2 = source.b1, source.b2
    own = jnp.asarray([b1, 1.0 - b1, b2, 1.0 - b2, source.eps], jnp.float32)
    batch = source.scalars.shape[0]
    return jnp.concatenate([source.scalars, jnp.tile(own, (batch, 1))], axis=1)


def update(
    grad: jax.Array,
    state: AdamWeight,
    scalars: AdamScalars,
    b1: float,
    b2: float,
    eps: float,
) -> AdamWeight:
    """The weights and moments after a step, in their dtypes.

    Operations are in the order of ``optax.adamw``.
    """
    wide = grad.astype(jnp.float32) * scalars.grad_scale
    weight = state.weight.astype(jnp.float32)
    mu = (1.0 - b1) * wide + b1 * state.mu
    nu = (1.0 - b2) * (wide * wide) + b2 * state.nu
    root = jnp.sqrt(nu / scalars.nu_bias) + eps
    step = mu / scalars.mu_bias / root + scalars.decay * weight
    weight = weight - scalars.rate * step
    return AdamWeight(weight.astype(state.weight.dtype), mu, nu)
