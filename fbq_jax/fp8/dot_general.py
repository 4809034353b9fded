"""Matrix products in FP8 with one scale per tensor, forward and backward.

Let ``Q4`` and ``Q5`` round to nearest in E4M3 and E5M2 (arXiv 2209.05433) with one
scale per tensor.  The three GEMMs of ``Y = X .  W`` are

    Y = Q4(X) . Q4(W)        dX = Q5(dY) . Q4(W)'        dW = Q4(X)' . Q5(dY)

They accumulate in float32, apply the scales and round once.  The backward pass reads
the codes of the forward pass.  The scale of a tensor is ``amax / max``, where ``max``
is the largest value of the format, 448 or 57344, and ``amax`` depends on the scaling
method:

- *current*: the largest magnitude of the tensor itself, which takes an extra pass over
  the tensor;
- *delayed* (as in NVIDIA's Transformer Engine and ``flax.linen.fp8_ops``; the results
  equal Flax's): the largest magnitude in a history of previous calls.  Larger values
  saturate.  While the history holds only zeros, or an Inf or a NaN, the scale does not
  change.

A NaN or an Inf turns every dependent result into NaN (in Flax, an Inf saturates).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from fbq_jax.core.arguments import DotArguments, compute_as_matrices
from fbq_jax.core.gemms import LHS_NAME, RHS_NAME
from fbq_jax.core.state_dtypes import round_into
from fbq_jax.fp8 import scaled_tensor
from fbq_jax.fp8.scaled_tensor import ScaledTensor
from fbq_jax.kernels.scales import find_amax
from fbq_jax.recipes.numbers_in_float32 import INT32, is_positive_int32
from fbq_jax.sharding.mesh_axes import max_over_copies

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2


class Scaling(NamedTuple):
    """The state of a tensor under delayed scaling.

    Attributes:
      scale: float32 ``[]``, of the last call: ``codes * scale`` are the values.
      amax_history: float32 ``[length]``, the largest magnitude in each of the last
        ``length`` calls: the last call first, then the others, oldest first.
    """

    scale: jax.Array
    amax_history: jax.Array


class Scalings(NamedTuple):
    """The states of the activation, the weight and the output's gradient.

    They are None under current scaling, which has no state.
    """

    lhs: Scaling | None = None
    rhs: Scaling | None = None
    grad: Scaling | None = None


def as_float32(scalings: Any) -> Any:
    """A tree of states in float32, whose gradient keeps the tree's dtypes.

    An ``amax`` that a state in float16 does not hold becomes the nearest one that is
    not 0: if it became 0, the scale would not change.
    """
    dtypes = {jnp.result_type(x) for x in jax.tree.leaves(scalings)}
    return scalings if dtypes <= {jnp.dtype(jnp.float32)} else _cast(scalings)


@jax.custom_vjp
def _cast(scalings: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), scalings)


def _cast_new(before: Any, new: Any) -> tuple[Any]:
    return (jax.tree.map(lambda x, y: round_into(y, x.dtype), before, new),)


_cast.defvjp(lambda scalings: (_cast(scalings), scalings), _cast_new)


def check_history(length: int) -> None:
    """Raises ValueError unless the length of a history is a positive integer."""
    if not is_positive_int32(length):
        raise ValueError(
            f"Fp8Dot.history takes a positive integer up to {INT32.max}; got {length!r}"
        )


def start(length: int) -> Scalings:
    """The state before the first arguments, with scales of 1 and histories of zeros.

    Args:
      length: the number of calls in each history.

    Raises:
      ValueError: the length is not a positive integer.
    """
    check_history(length)

    def scaling() -> Scaling:
        return Scaling(jnp.ones((), jnp.float32), jnp.zeros(length, jnp.float32))

    return Scalings(scaling(), scaling(), scaling())


def dot_general(
    scalings: Scalings, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
) -> jax.Array:
    """``lax.dot_general(lhs, rhs, ...)`` in FP8; lhs is the activation.

    The gradient with respect to ``scalings`` is the new state (see ``matmul``).
    """

    def multiply(
        x: jax.Array, w: jax.Array, dtype: Any, scalings: Scalings
    ) -> jax.Array:
        return matmul(Spec(dtype, x.dtype, w.dtype), x, w, scalings)

    return compute_as_matrices(multiply, lhs, rhs, arguments, scalings)


class Spec(NamedTuple):
    """The dtypes of Y, dX and dW."""

    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(spec: Spec, x: jax.Array, w: jax.Array, scalings: Scalings) -> jax.Array:
    """Multiplies the activation with the weight.

    The gradient with respect to ``scalings`` is its new value, because only the
    backward pass knows the largest magnitude of the output's gradient.

    Args:
      spec: the dtypes of the results.
      x: the activation, bfloat16, float16 or float32 ``[B, M, K]``.
      w: the weight, bfloat16, float16 or float32 ``[B, K, N]``.
      scalings: the states of the three tensors.

    Returns:
      ``[B, M, N]``.
    """
    return _matmul_fwd(spec, x, w, scalings)[0]


class _Residuals(NamedTuple):
    """The values that the forward pass saves for the backward pass.

    Attributes:
      lhs: the codes of X.
      rhs: the codes of W.
      scalings: the states, with new values for X and W.
    """

    lhs: ScaledTensor
    rhs: ScaledTensor
    scalings: Scalings


def _matmul_fwd(
    spec: Spec, x: jax.Array, w: jax.Array, scalings: Scalings
) -> tuple[jax.Array, _Residuals]:
    lhs, new_lhs = quantize(x, E4M3, scalings.lhs)
    rhs, new_rhs = quantize(w, E4M3, scalings.rhs)
    # DEFAULT lets a GPU accumulate fast; the backward products must not.
    y = _multiply(lhs, rhs, spec.dtype, lax.Precision.DEFAULT)
    lhs, rhs = checkpoint_name(lhs, LHS_NAME), checkpoint_name(rhs, RHS_NAME)
    return y, _Residuals(lhs, rhs, Scalings(new_lhs, new_rhs, scalings.grad))


def _matmul_bwd(
    spec: Spec, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, Scalings]:
    lhs, rhs, scalings = residuals
    grad, new_grad = quantize(dy, E5M2, scalings.grad)
    dx = _multiply(grad, _transpose(rhs), spec.lhs_dtype, lax.Precision.HIGHEST)
    dw = _multiply(_transpose(lhs), grad, spec.rhs_dtype, lax.Precision.HIGHEST)
    return dx, dw, scalings._replace(grad=new_grad)


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _multiply(
    lhs: ScaledTensor, rhs: ScaledTensor, dtype: Any, precision: lax.Precision
) -> jax.Array:
    dims = (((2,), (1,)), ((0,), (0,)))
    y = lax.dot_general(lhs.values, rhs.values, dims, precision, jnp.float32)
    # The product of two small scales may be 0.
    return (y * lhs.scale * rhs.scale).astype(dtype)


def _transpose(x: ScaledTensor) -> ScaledTensor:
    return ScaledTensor(x.values.mT, x.scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def quantize(
    x: jax.Array, dtype: jax.typing.DTypeLike, scaling: Scaling | None
) -> tuple[ScaledTensor, Scaling | None]:
    """Quantizes a tensor and returns its new state.

    Args:
      x: bfloat16, float16 or float32, of any shape.
      dtype: ``E4M3`` or ``E5M2``.
      scaling: the state before; None for current scaling, which has no state.

    >>> state = Scaling(jnp.float32(1.0), jnp.array([0.0, 448.0, 2.0]))
    >>> x = jnp.array([3.0, -500.0])
    >>> codes, state = jax.jit(quantize, static_argnums=1)(x, E4M3, state)
    >>> codes.values, state.amax_history
    (Array([3, -448], dtype=float8_e4m3fn), Array([500.,   2.,   0.], dtype=float32))
    """
    x = x.astype(jnp.float32)
    if scaling is None:
        return scaled_tensor.quantize(x, dtype), None
    largest = float(jnp.finfo(dtype).max)
    amax = find_amax(scaling.amax_history)
    moves = (amax > 0.0) & jnp.isfinite(amax)
    divisor = jnp.where(moves, amax, 1.0)
    # The order of operations is Flax's, for equal results.
    scale = jnp.where(
        moves,
        1.0 / jnp.minimum(largest / divisor, scaled_tensor.MAX_FACTOR),
        scaling.scale,
    )
    values = jnp.clip(x / scale, -largest, largest)
    # The difference of an Inf or a NaN with itself is NaN.  (A constant NaN would stop
    # every call under jax_debug_nans.)
    values = jnp.where(jnp.isfinite(x), values, x - x).astype(dtype)
    last = max_over_copies(find_amax(x, initial=0), scaling.amax_history)
    last = _max_over_examples(last, scaling.amax_history)
    history = jnp.roll(scaling.amax_history, -1).at[0].set(last)
    return ScaledTensor(values, scale), Scaling(scale, history)


@custom_vmap
def _max_over_examples(amax: jax.Array, _history: jax.Array) -> jax.Array:
    """The largest magnitude, under ``vmap`` of all examples that share a history.

    If each had one, their histories would be summed: the gradient with respect to an
    array that examples share is a sum.
    """
    return amax


@_max_over_examples.def_vmap
def _map_max_over_examples(
    _size: int, in_batched: list[bool], amax: jax.Array, history: jax.Array
) -> tuple[jax.Array, bool]:
    of_amax, of_history = in_batched
    if of_amax and not of_history:
        return _max_over_examples(jnp.max(amax, axis=0), history), False
    return _max_over_examples(amax, history), of_amax


@quantize.defjvp
def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError("a quantized dot has no second derivative")
