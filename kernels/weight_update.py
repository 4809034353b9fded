"""A weight after a step of an optimizer, as a source of ``quantize``.

A layer's products are the only readers of a weight between two steps.  One kernel
therefore updates a weight and quantizes it: it reads the gradient, the weight and the
moments once, and the step after it reads codes.  With the gradient ``g``, the weight
``w`` and ``t`` steps so far, AdamW computes in float32:

    m' = b1 m + (1 - b1) g        u = (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps)
    v' = b2 v + (1 - b2) g^2      w' = w - rate (u + decay w)

SGD has no moments, and ``u = g``.  The codes are of ``w'``, rounded to the dtype of the
products.
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


class WeightState(NamedTuple):
    """A weight and its moments, of one shape.

    Attributes:
      weight: float32 or bfloat16.
      mu: the first moments, float32; None for SGD.
      nu: the second moments, float32; None for SGD.
    """

    weight: jax.Array
    mu: jax.Array | None = None
    nu: jax.Array | None = None


class UpdateScalars(NamedTuple):
    """The numbers of a step, float32 ``[]``.

    Attributes:
      rate: the learning rate.
      decay: the weight decay.
      grad_scale: a factor of the gradient, as of clipping.
      mu_decay: ``b1``.
      mu_gain: ``1 - b1``.
      mu_bias: ``1 - b1^t``.
      nu_decay: ``b2``.
      nu_gain: ``1 - b2``.
      nu_bias: ``1 - b2^t``.
      eps: added to the root of the second moment.
    """

    rate: jax.Array
    decay: jax.Array
    grad_scale: jax.Array
    mu_decay: jax.Array
    mu_gain: jax.Array
    mu_bias: jax.Array
    nu_decay: jax.Array
    nu_gain: jax.Array
    nu_bias: jax.Array
    eps: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "state", "scalars"],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class UpdatedWeight:
    """Weights ``[B, K, N]`` after a step.  It saves their new ``WeightState``.

    The weights of gate and up are ``[B, K, 2, F]``, which the products read as
    ``join_gate_up`` joins them.

    Attributes:
      values: the gradient, bfloat16, float16 or float32, of the weights' shape.
      state: the weights and their moments.
      scalars: ``UpdateScalars`` as float32 ``[B, 10]``.
      dtype: the dtype of the products with the weight.
    """

    values: jax.Array
    state: WeightState
    scalars: jax.Array
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

    def compute(self) -> tuple[jax.Array, WeightState]:
        """The weights in the dtype of the products, and the new state."""
        ones = (1,) * (self.values.ndim - 1)
        numbers = self.scalars.T.reshape(*self.scalars.T.shape, *ones)
        new = update(self.values, self.state, UpdateScalars(*numbers))
        weight = new.weight.astype(self.dtype)
        if weight.ndim == 4:
            weight = join_gate_up(weight[:, :, 0], weight[:, :, 1])
        return weight, new


def update(grad: jax.Array, state: WeightState, scalars: UpdateScalars) -> WeightState:
    """The weights and moments after a step, in their dtypes.

    Operations are in the order of ``optax.adamw``.
    """
    weight, mu, nu = state
    step = grad.astype(jnp.float32) * scalars.grad_scale
    if mu is not None and nu is not None:
        mu = scalars.mu_gain * step + scalars.mu_decay * mu
        nu = scalars.nu_gain * (step * step) + scalars.nu_decay * nu
        step = mu / scalars.mu_bias / (jnp.sqrt(nu / scalars.nu_bias) + scalars.eps)
    wide = weight.astype(jnp.float32)
    new = wide - scalars.rate * (step + scalars.decay * wide)
    return WeightState(new.astype(weight.dtype), mu, nu)
