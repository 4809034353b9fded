"""A quantized ``lax.dot_general`` for any ``dimension_numbers``.

The function is pure: a threshold goes in, and the metric of each activation block comes
out.  Callers that keep state update it outside.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax.core import matmul_vjp, threshold
from fbq_jax.core.dimension_numbers import DimensionNumbers, as_matrices, is_requested
from fbq_jax.core.dot_call import DotCall, RaggedCall
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars
from fbq_jax.core.threshold import Stats as Stats
from fbq_jax.core.weight_products import mark_weight
from fbq_jax.ops import dispatch
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.explicit_axes import automatic
from fbq_jax.sharding.manual_axes import as_varying

Call = TypeVar("Call", DotCall, RaggedCall)


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """The static settings of a quantized dot.

    Attributes:
      recipe: how the three GEMMs are quantized.
      implementation: ``"mosaic"``, ``"triton"``, ``"tpu"`` or ``"reference"``;
        None lets ``fbq_jax.ops.dispatch`` choose.
      ignore_precision: whether a product that asks for a precision is quantized.

    Raises:
      TypeError: ``recipe`` is not a ``Recipe``.
      ValueError: no implementation has this name.
    """

    recipe: Recipe
    implementation: str | None = None
    ignore_precision: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                "a quantized dot takes a Recipe, such as fbq_jax.recipes.fallback; got "
                f"{self.recipe!r}"
            )
        dispatch.check_name(self.implementation)

    def marked(self, rhs: jax.Array, call: Call) -> tuple[jax.Array, Call]:
        """The weight, marked for reports, and the call that the recipe computes."""
        ignores = self.ignore_precision and is_requested(call.precision)
        rhs = mark_weight(rhs, self.recipe, ignores_precision=ignores)
        return rhs, call._replace(precision=None) if ignores else call


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe = fallback,
    theta: jax.Array | float | None = None,
    key: jax.Array | None = None,
    out_sharding: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats]:
    """``lax.dot_general`` with quantized GEMMs in the forward and backward passes.

    Let ``X``, ``W`` and ``dY`` be the operands and the output's gradient as matrices,
    ``Q`` nearest rounding to INT8, ``R`` nearest rounding with a residual term in the
    blocks that fall back, and ``S`` stochastic rounding.  The recipe ``fallback``
    (arXiv 2503.08040) computes::

        Y = R(X) . Q(W)        dX = S(dY) . Q(W)'        dW = S(X)' . S(dY)

    The function is pure: pass the threshold as ``theta``; ``Stats`` has the next one.

    Args:
      lhs: the activation, whose blocks may fall back; bfloat16, float16 or float32.
        Roles follow the position of the operands: ``jnp.einsum`` may swap them.
      rhs: the weight; bfloat16, float16 or float32.
      dimension_numbers: the contracting dimensions of lhs and rhs and their batch
        dimensions, as in ``lax.dot_general``.
      precision: None or DEFAULT; the recipe sets the precision.
      preferred_element_type: the output's dtype; None takes the operands' common one,
        which is float32 for float16 and bfloat16, as in ``jnp.matmul``.
      recipe: how the three GEMMs are quantized.
      theta: the threshold of fallback, at least 0.  None takes the quantile of lhs' own
        blocks that puts the fallback rate in the middle of the recipe's range; so does
        a traced value, or a layer's state, that is negative or NaN.
      key: a PRNG key for stochastic rounding.  Training should pass a new key to each
        call; without a key every call draws the same noise.
      out_sharding: the output's sharding over explicit mesh axes.
      implementation: ``"mosaic"``, ``"triton"``, ``"tpu"`` or ``"reference"``;
        None lets ``fbq_jax.ops.dispatch`` choose.

    Returns:
      The output, with the shape that ``lax.dot_general`` gives, and ``Stats``.

    Raises:
      TypeError: an operand is not an array or has another dtype, or ``recipe`` is not a
        ``Recipe``.
      ValueError: the dimensions do not fit, theta is negative, another precision is
        requested, or the implementation cannot run here.

    >>> x, w = jnp.ones((4, 64)), jnp.ones((64, 8))
    >>> y, stats = dot_general(x, w, (((1,), (0,)), ((), ())), theta=0.5)
    >>> float(y[0, 0]), float(stats.rate)
    (64.0, 1.0)
    """
    call = DotCall(dimension_numbers, precision, preferred_element_type, out_sharding)
    config = DotConfig(recipe, implementation)
    scalars = Scalars(checked_theta(theta), seed_from_key(key))
    out, stats = _seeded_dot_general(config, scalars, lhs, rhs, call)
    batch, *rows, columns = stats.metric.shape
    metric = stats.metric.reshape(batch, math.prod(rows), columns)
    return out, stats._replace(metric=metric)


def checked_theta(theta: jax.Array | float | None) -> jax.Array:
    """The threshold that a caller passes, as float32 ``[]``; None is ``UNSET``."""
    if theta is None:
        theta = threshold.UNSET
    elif jnp.ndim(theta):
        raise ValueError(
            f"theta takes a scalar; got an array of shape {jnp.shape(theta)}"
        )
    elif not isinstance(theta, jax.core.Tracer):
        value = np.asarray(theta)
        if not jnp.issubdtype(value.dtype, np.number) or not value >= 0.0:
            raise ValueError(f"theta takes a threshold of at least 0; got {theta!r}")
    return jnp.asarray(theta, jnp.float32)


def seed_from_key(key: jax.Array | None) -> jax.Array:
    """The seed, uint32 ``[]``, of a call's noise; without a key it is 0."""
    if key is None:
        return jnp.zeros((), jnp.uint32)
    return jax.random.bits(key, (), jnp.uint32)


def stateful_dot_general(
    config: DotConfig,
    state: Mapping[str, jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    call: DotCall,
    codes: QTensor | None = None,
) -> tuple[jax.Array, threshold.State]:
    """``dot_general`` with the state of a layer.

    Args:
      config: the recipe and the implementation.
      state: the layer's ``threshold.State``.
      lhs: the activation.
      rhs: the weight.  In a frozen layer only its shape and dtype are read.
      call: the other arguments of ``lax.dot_general``.
      codes: the colwise codes of a frozen layer's weight
        (``fbq_jax.core.frozen_weight``).

    Returns:
      The output, and the state after a training forward; evaluation drops the latter.
    """
    old = threshold.canonicalize_state(state)
    scalars = threshold.scalars_of(old)
    rhs, call = config.marked(rhs, call)
    out, stats = _seeded_dot_general(config, scalars, lhs, rhs, call, codes)
    return out, threshold.next_state(old, stats)


def _seeded_dot_general(
    config: DotConfig,
    scalars: Scalars,
    lhs: jax.Array,
    rhs: jax.Array,
    call: DotCall,
    codes: QTensor | None = None,
) -> tuple[jax.Array, Stats]:
    """``dot_general``; a traced threshold may be ``threshold.UNSET``."""
    out = call.output(lhs, rhs)
    recipe = config.recipe
    # A frozen layer has nothing to multiply by but its codes.
    if codes is None and not _quantizes(config, lhs, rhs, call, out):
        return _float_dot_general(scalars, lhs, rhs, call)
    spec = Spec(recipe, out.dtype, lhs.dtype, rhs.dtype, config.implementation)

    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        scalars: Scalars,
        codes: QTensor | None,
    ) -> tuple[jax.Array, Stats]:
        x, w = as_matrices(lhs, rhs, call.dimension_numbers, recipe)
        x, weight = as_varying((x, w if codes is None else codes))
        y, stats = _matmul(spec, x, weight, scalars.on_device(x))
        return y.reshape(out.shape), stats

    return automatic(multiply, out)(lhs, rhs, scalars, codes)


def _matmul(
    spec: Spec, x: jax.Array, w: jax.Array | QTensor, scalars: Scalars
) -> tuple[jax.Array, Stats]:
    """``matmul_vjp.matmul``; the weight of a frozen layer is its colwise codes."""
    return matmul_vjp.matmul(spec, x, w.main if isinstance(w, QTensor) else w, scalars)


def _quantizes(
    config: DotConfig,
    lhs: jax.Array,
    rhs: jax.Array,
    call: DotCall,
    out: jax.core.ShapedArray,
) -> bool:
    """Whether the recipe quantizes operands of these shapes; warns if it does not."""
    recipe = config.recipe
    if recipe.where_slower == "quantize" or 0 in (sizes := call.sizes(lhs, out)):
        return True
    choice = dispatch.choose_layer(
        recipe,
        sizes,
        dtype=jnp.promote_types(lhs.dtype, rhs.dtype),
        implementation=config.implementation,
    )
    dispatch.warn_where_slower(choice, recipe, sizes)
    return choice.quantized


def _float_dot_general(
    scalars: Scalars, lhs: jax.Array, rhs: jax.Array, call: DotCall
) -> tuple[jax.Array, Stats]:
    """``lax.dot_general``, and the stats of a call that has no blocks."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    y = lax.dot_general(
        lhs.astype(dtype),
        rhs.astype(dtype),
        call.dimension_numbers,
        preferred_element_type=call.preferred_element_type,
        out_sharding=call.out_sharding,
    )
    _, (batch, _) = call.dimension_numbers
    matrices = math.prod(lhs.shape[axis] for axis in batch)
    metric = jnp.zeros((matrices, 0, 0), jnp.float32)
    return y, threshold.without_fallback(scalars, metric)
