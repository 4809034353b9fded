"""Smooth-SwiGLU: SwiGLU whose output FP8 can hold (arXiv 2409.12517).

SwiGLU's output, ``silu(gate) * up``, grows with the square of its input once the
weights of its two branches align, as they do late in training.  Scales taken from past
steps miss such an outlier.  Smooth-SwiGLU divides ``up`` by its largest magnitude
before the quantizer ``Q`` of the down projection, and multiplies by it afterwards.
Two forms are published, and they are different algorithms:

=========== ========================= =======================================
per_channel the paper's equation,     ``s [C] = max over tokens |up|``
            ``s_i = 1 / s[i]`` there  ``Y = Q(silu(gate) * up / s) . Q(s W)``
per_token   the authors' code         ``s [T] = max over channels |up|``
                                      ``Y = s (Q(silu(gate) * up / s) . Q(W))``
=========== ========================= =======================================

Both take the maximum of ``up``, as the code does.  The down projection contracts the
axis C, so scales per channel cannot be undone after it: they multiply the rows of W
before W is quantized.  Scales per token multiply the projection's output.  Without
``Q`` both forms equal SwiGLU for any ``s``, which is a constant in differentiation.
``fold`` merges constant channel scales, from calibration data, into the weights.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fbq_jax.core import nonlinear
from fbq_jax.kernels.scales import find_amax

Smooth = Literal["per_channel", "per_token"]


def per_channel(
    gate: jax.Array, up: jax.Array, *, bits: int = 10
) -> tuple[jax.Array, jax.Array]:
    """The paper's form, with one scale per channel.

    Args:
      gate: bfloat16, float16 or float32 ``[..., C]``.
      up: an array of gate's shape and dtype.
      bits: bits per value saved for the backward pass (``nonlinear.silu_gate``).

    Returns:
      ``silu(gate) * up / s``, and ``s [C]``, which must multiply the rows of the down
      projection's weight (``scale_rows``).  ``s`` is 1 where a channel is all zeros.

    Raises:
      TypeError, ValueError: as ``nonlinear.silu_gate`` raises them.

    >>> x = jnp.array([[1.0, 2.0], [-4.0, 1.0]])
    >>> jax.jit(per_channel)(x, x)[1]
    Array([4., 2.], dtype=float32)
    """
    y, scale = _smooth(gate, up, tuple(range(up.ndim - 1)), bits)
    return y, scale.reshape(-1)


def per_token(
    gate: jax.Array, up: jax.Array, *, bits: int = 10
) -> tuple[jax.Array, jax.Array]:
    """The form of the authors' code, with one scale per token.

    Args:
      gate: bfloat16, float16 or float32 ``[..., C]``.
      up: an array of gate's shape and dtype.
      bits: bits per value saved for the backward pass (``nonlinear.silu_gate``).

    Returns:
      ``silu(gate) * up / s``, and ``s [..., 1]``, which must multiply the down
      projection's output.  ``s`` is 1 where a token is all zeros.

    Raises:
      TypeError, ValueError: as ``nonlinear.silu_gate`` raises them.
    """
    return _smooth(gate, up, -1, bits)


def _smooth(
    gate: jax.Array, up: jax.Array, axes: int | tuple[int, ...], bits: int
) -> tuple[jax.Array, jax.Array]:
    """The output, and the largest ``|up|`` along axes, which become 1 wide."""
    wide = lax.stop_gradient(up).astype(jnp.float32)
    amax = find_amax(wide, axes, keepdims=True, initial=0).astype(up.dtype)
    scale = jnp.where(amax == 0.0, 1.0, amax)
    # In float16 XLA would multiply by 1 / scale, which may be too large for it.
    quotient = up.astype(jnp.float32) / scale.astype(jnp.float32)
    return nonlinear.silu_gate(gate, quotient.astype(up.dtype), bits=bits), scale


def scale_rows(
    dot_general: Callable[..., jax.Array], scale: jax.Array
) -> Callable[..., jax.Array]:
    """A ``dot_general`` for ``nn.Dense`` that first multiplies the kernel's rows.

    Args:
      dot_general: called with the scaled kernel.
      scale: float ``[C]``, one value per row.

    >>> dot = scale_rows(lax.dot_general, jnp.array([2.0, 3.0]))
    >>> dot(jnp.ones((1, 2)), jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
    Array([[5.]], dtype=float32)
    """

    def dot(lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        scaled = rhs * scale[:, None].astype(rhs.dtype)
        return dot_general(lhs, scaled, *args, **options)

    return dot


class SmoothSwiGLU(nn.Module):
    """A Transformer's gated MLP, ``down(silu(gate(x)) * up(x))``, without biases.

    With ``per_channel`` it sows its scale into ``intermediates``, for calibration.

    Attributes:
      features: C, the width between the projections.
      smooth: ``"per_channel"``, ``"per_token"``, or None for plain SwiGLU, which also
        runs folded weights.
      dot_general: multiplies in the projections; None uses JAX's.
      dtype: dtype of the computation; None promotes the input's and the parameters'
        dtypes.
      param_dtype: dtype of the parameters.
      bits: bits per value saved for the backward pass, 4 to 12.

    Raises:
      ValueError: ``smooth`` is another value.

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
        """Maps ``[..., D]`` to the same shape."""
        if self.smooth is not None and self.smooth not in get_args(Smooth):
            raise ValueError(
                f"smooth must be one of {get_args(Smooth)} or None; got {self.smooth!r}"
            )

        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            dot_general=self.dot_general,
        )
        gate = dense(self.features, name="gate")(x)
        up = dense(self.features, name="up")(x)
        if self.smooth == "per_channel":
            y, scale = per_channel(gate, up, bits=self.bits)
            self.sow("intermediates", "scale", scale)
            dot = scale_rows(self.dot_general or lax.dot_general, scale)
            return dense(x.shape[-1], name="down", dot_general=dot)(y)
        down = dense(x.shape[-1], name="down")
        if self.smooth == "per_token":
            y, scale = per_token(gate, up, bits=self.bits)
            return down(y) * scale
        return down(nonlinear.silu_gate(gate, up, bits=self.bits))


def fold(params: Mapping[str, Any], scale: jax.Array) -> dict[str, Any]:
    """Merges channel scales into the weights, for inference.

    Plain SwiGLU of the folded weights computes ``silu(gate) * up / s``.  Quantizing
    them gives the paper's ``Q(s_i w_1i)`` and ``Q(w_3i / s_i)``.

    Args:
      params: the parameters of ``SmoothSwiGLU``: ``gate``, ``up`` and ``down``, each
        with a ``kernel``.
      scale: positive ``[C]``, the maximum of the scales of calibration data.

    Returns:
      Parameters for ``SmoothSwiGLU(smooth=None)``, in the dtypes of ``params``.

    Raises:
      ValueError: ``scale`` is not one positive value per channel.  (Token scales cannot
        be merged into weights.)

    >>> params = {name: {"kernel": jnp.ones((2, 2))} for name in ("gate", "up", "down")}
    >>> fold(params, jnp.array([1.0, 4.0]))["down"]["kernel"]
    Array([[1., 1.],
           [4., 4.]], dtype=float32)
    """
    up, down = params["up"]["kernel"], params["down"]["kernel"]
    if scale.shape != up.shape[-1:] or not jnp.all(scale > 0.0):
        raise ValueError(
            f"fold needs a positive scale for each of {up.shape[-1]} channels; got an "
            f"array {scale.shape} with minimum {jnp.min(scale, initial=jnp.inf)}"
        )
    scale = scale.astype(jnp.float32)
    up_kernel = (up.astype(jnp.float32) / scale[None, :]).astype(up.dtype)
    down_kernel = (down.astype(jnp.float32) * scale[:, None]).astype(down.dtype)
    return {
        **params,
        "up": {**params["up"], "kernel": up_kernel},
        "down": {**params["down"], "kernel": down_kernel},
    }
