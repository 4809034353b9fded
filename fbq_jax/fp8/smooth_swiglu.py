"""Smooth-SwiGLU: SwiGLU whose output FP8 can hold (arXiv 2409.12517).

SwiGLU's output, ``silu(gate) * up``, grows with the square of its input once the
weights of its branches align, as they do late in training; scales of past steps miss
such an outlier.  Smooth-SwiGLU divides ``up`` by its largest magnitude before the
quantizer ``Q`` of the down projection, and undoes that after it.  There are two
published forms, and they are different algorithms:

=========== ========================= =======================================
per_channel the paper's equation,     ``s [C] = max over tokens |up|``
            ``s_i = 1 / s[i]`` there  ``Y = Q(silu(gate) * up / s) . Q(s W)``
per_token   the authors' code         ``s [T] = max over channels |up|``
                                      ``Y = s (Q(silu(gate) * up / s) . Q(W))``
=========== ========================= =======================================

The maximum is that of ``up`` in both, as it is in the code.  C is the axis that the
down projection contracts: a scale of each channel cannot be undone after it, so it goes
into the rows of W before those are quantized; a scale of each token can.  Without ``Q``
both are SwiGLU, whatever ``s``: it is a constant to differentiation.  Constant scales
of channels, from calibration data, go into the weights for good (``fold``).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fbq_jax.core import nonlinear

Smooth = Literal["per_channel", "per_token"]


def per_channel(
    gate: jax.Array, up: jax.Array, *, bits: int = 10
) -> tuple[jax.Array, jax.Array]:
    """The paper's form, with a scale for each channel.

    Args:
      gate: bfloat16, float16 or float32 ``[..., C]``.
      up: of gate's shape and dtype.
      bits: of each value saved for the backward pass (``nonlinear.silu_gate``).

    Returns:
      ``silu(gate) * up / s``, and ``s [C]``, by which the rows of the down projection's
      weight have to be multiplied; 1 where a channel is 0 in every token.

    Raises:
      TypeError, ValueError: as ``nonlinear.silu_gate`` does.

    >>> x = jnp.array([[1.0, 2.0], [-4.0, 1.0]])
    >>> jax.jit(per_channel)(x, x)[1]
    Array([4., 2.], dtype=float32)
    """
    scale = _largest(up, tuple(range(up.ndim - 1)))
    return nonlinear.silu_gate(gate, up / scale, bits=bits), scale.reshape(-1)


def per_token(
    gate: jax.Array, up: jax.Array, *, bits: int = 10
) -> tuple[jax.Array, jax.Array]:
    """The form of the authors' code, with a scale for each token.

    Args:
      gate: bfloat16, float16 or float32 ``[..., C]``.
      up: of gate's shape and dtype.
      bits: of each value saved for the backward pass (``nonlinear.silu_gate``).

    Returns:
      ``silu(gate) * up / s``, and ``s [..., 1]``, by which the down projection's output
      has to be multiplied; 1 where a token is 0 in every channel.

    Raises:
      TypeError, ValueError: as ``nonlinear.silu_gate`` does.
    """
    scale = _largest(up, -1)
    return nonlinear.silu_gate(gate, up / scale, bits=bits), scale


def _largest(up: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    amax = jnp.max(jnp.abs(lax.stop_gradient(up)), axis, keepdims=True, initial=0.0)
    return jnp.where(amax == 0.0, 1.0, amax)


def scale_rows(
    dot_general: Callable[..., jax.Array], scale: jax.Array
) -> Callable[..., jax.Array]:
    """A ``dot_general`` for ``nn.Dense`` that multiplies the kernel's rows.

    Args:
      dot_general: the one to call.
      scale: float ``[C]``, by row.

    >>> dot = scale_rows(lax.dot_general, jnp.array([2.0, 3.0]))
    >>> dot(jnp.ones((1, 2)), jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
    Array([[5.]], dtype=float32)
    """

    def dot(lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return dot_general(
            lhs, rhs * scale[:, None].astype(rhs.dtype), *args, **options
        )

    return dot


class SmoothSwiGLU(nn.Module):
    """A Transformer's gated MLP, ``down(silu(gate(x)) * up(x))``, without biases.

    ``per_channel`` sows its scale into ``intermediates``, where calibration finds it.

    Attributes:
      features: the width C between the projections.
      smooth: ``"per_channel"``, ``"per_token"``, or None for SwiGLU itself, which is
        what computes with folded weights.
      dot_general: of the projections; None for JAX's own.
      dtype: of the computation; None takes that of the input and parameters together.
      param_dtype: of the parameters.
      bits: of each value saved for the backward pass, 4 to 12.

    >>> mlp = SmoothSwiGLU(32, smooth="per_token")
    >>> x = jnp.ones((4, 8))
    >>> y, variables = jax.jit(mlp.init_with_output)(jax.random.key(0), x)
    >>> y.shape, sorted(variables["params"])
    ((4, 8), ['down', 'gate', 'up'])
    """

    features: int
    smooth: Smooth | None = "per_channel"
    dot_general: Callable[..., jax.Array] | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    bits: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Transforms ``[..., D]``."""
        if self.smooth is not None and self.smooth not in get_args(Smooth):
            raise ValueError(
                f"smooth takes one of {get_args(Smooth)} or None; got {self.smooth!r}"
            )

        def project(
            name: str, features: int, dot_general: Callable[..., jax.Array] | None
        ) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                dot_general=dot_general,
                name=name,
            )

        gate = project("gate", self.features, self.dot_general)(x)
        up = project("up", self.features, self.dot_general)(x)
        if self.smooth == "per_channel":
            y, scale = per_channel(gate, up, bits=self.bits)
            self.sow("intermediates", "scale", scale)
            dot = scale_rows(self.dot_general or lax.dot_general, scale)
            return project("down", x.shape[-1], dot)(y)
        down = project("down", x.shape[-1], self.dot_general)
        if self.smooth == "per_token":
            y, scale = per_token(gate, up, bits=self.bits)
            return down(y) * scale
        return down(nonlinear.silu_gate(gate, up, bits=self.bits))


def fold(params: Mapping[str, Any], scale: jax.Array) -> dict[str, Any]:
    """Puts scales of channels into the weights, for inference.

    SwiGLU of the folded weights computes ``silu(gate) * up / s`` by itself: the paper's
    ``Q(s_i w_1i)`` and ``Q(w_3i / s_i)``, where these are quantized.

    Args:
      params: of ``SmoothSwiGLU``: ``gate``, ``up`` and ``down`` with a ``kernel`` each.
      scale: ``[C]``, positive; the maximum of calibration data's scales.

    Returns:
      The parameters for ``SmoothSwiGLU(smooth=None)``, in the dtypes of the old.

    Raises:
      ValueError: there is no positive scale for each channel. (Scales of tokens do not
        go into weights.)

    >>> params = {name: {"kernel": jnp.ones((2, 2))} for name in ("gate", "up", "down")}
    >>> fold(params, jnp.array([1.0, 4.0]))["down"]["kernel"]
    Array([[1., 1.],
           [4., 4.]], dtype=float32)
    """
    up, down = params["up"]["kernel"], params["down"]["kernel"]
    if scale.shape != up.shape[-1:] or not jnp.all(scale > 0.0):
        raise ValueError(
            f"fold takes a positive scale for each of {up.shape[-1]} channels; got an "
            f"array {scale.shape} from {jnp.min(scale, initial=jnp.inf)}"
        )
    scale = scale.astype(jnp.float32)
    up_kernel = (up.astype(jnp.float32) / scale[None, :]).astype(up.dtype)
    down_kernel = (down.astype(jnp.float32) * scale[:, None]).astype(down.dtype)
    return {
        **params,
        "up": {**params["up"], "kernel": up_kernel},
        "down": {**params["down"], "kernel": down_kernel},
    }
