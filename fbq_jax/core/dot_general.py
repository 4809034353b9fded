"""A quantized ``lax.dot_general`` for any ``dimension_numbers``.

The function is pure: a threshold goes in, and the metric of each activation block comes
out.  Callers that keep state update it outside.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax.core import gemms, threshold
from fbq_jax.core.arguments import (
    DimensionNumbers,
    DotArguments,
    as_matrices,
    is_requested,
)
from fbq_jax.core.gemms import Spec
from fbq_jax.core.threshold import Scalars
from fbq_jax.core.threshold import Stats as Stats
from fbq_jax.core.training_warnings import warn_without_key
from fbq_jax.core.visitors import visitor
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.ops import dispatch
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.mesh_axes import as_varying, run_over_auto_axes


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

    def ignoring(self, arguments: DotArguments) -> tuple[DotArguments, bool]:
        """The arguments without a precision that is ignored, and whether one is."""
        ignores = self.ignore_precision and is_requested(arguments.precision)
        return arguments._replace(precision=None) if ignores else arguments, ignores


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
        call.  Without a key every call draws the same noise, and a gradient of rhs
        warns once, unless the recipe draws none.
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
    arguments = DotArguments(
        dimension_numbers, precision, preferred_element_type, out_sharding
    )
    config = DotConfig(recipe, implementation)
    scalars = stateless_scalars(theta, key)
    if key is None and _quantizes(config, lhs, rhs, arguments):
        rhs = warn_without_key("dot_general", recipe, rhs)
    out, stats = seeded_dot_general(config, scalars, lhs, rhs, arguments)
    batch, *rows, columns = stats.metric.shape
    metric = stats.metric.reshape(batch, math.prod(rows), columns)
    return out, stats._replace(metric=metric)


def stateless_scalars(
    theta: jax.Array | float | None = None, key: jax.Array | None = None
) -> Scalars:
    """The scalars of a call without state; arguments are as in ``dot_general``."""
    return Scalars(checked_theta(theta), seed_from_key(key))


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


@dataclasses.dataclass(frozen=True)
class LayerDot:
    """The dot of a layer: its weight, its state, and where its new state goes.

    Attributes:
      config: the recipe and the implementation.
      state: the layer's ``threshold.State``.
      weight: the right operand.  In a frozen layer only its shape and dtype are read.
      codes: the weight as the layer's state has it quantized; None to quantize it.
      is_frozen: whether the layer has nothing else to multiply by; its codes are
        colwise only.
      commit: takes the output and the state after a training forward.  It stores the
        state, unless the layer evaluates, and returns the output.
      named: names the layer in warnings about the ops that are traced in its context.
      sow: takes measurements by name; None to drop them.
    """

    config: DotConfig
    state: Mapping[str, jax.Array]
    weight: jax.Array
    codes: Layouts | None
    is_frozen: bool
    commit: Callable[[jax.Array, threshold.State], jax.Array]
    named: Callable[[], AbstractContextManager[None]]
    sow: Callable[[str, jax.Array], object] | None = None

    def multiply(self, lhs: jax.Array, arguments: DotArguments) -> jax.Array:
        """Computes the product with lhs, and updates the state."""
        with self.named():
            instead = visitor.value.multiply(self, lhs, arguments)
            if instead is not None:
                return instead
            old = threshold.canonicalize_state(self.state)
            out, stats = seeded_dot_general(
                self.config,
                threshold.scalars_of(old),
                lhs,
                self.weight,
                arguments,
                self.codes,
                is_frozen=self.is_frozen,
            )
        return self.commit(out, threshold.next_state(old, stats))


def seeded_dot_general(
    config: DotConfig,
    scalars: Scalars,
    lhs: jax.Array,
    rhs: jax.Array,
    arguments: DotArguments,
    codes: Layouts | None = None,
    *,
    is_frozen: bool = False,
) -> tuple[jax.Array, Stats]:
    """``dot_general`` by scalars; a traced threshold may be ``threshold.UNSET``."""
    out = arguments.output(lhs, rhs)
    recipe = config.recipe
    if not is_frozen and not _quantizes(config, lhs, rhs, arguments):
        return _float_dot_general(scalars, lhs, rhs, arguments)
    spec = Spec(recipe, out.dtype, lhs.dtype, rhs.dtype, config.implementation)

    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        scalars: Scalars,
        codes: Layouts | None,
    ) -> tuple[jax.Array, Stats]:
        x, w = as_matrices(lhs, rhs, arguments.dimension_numbers, recipe)
        x, weight, codes = as_varying((x, None if is_frozen else w, codes))
        y, stats = gemms.matmul(spec, x, weight, scalars.on_device(x), codes)
        return y.reshape(out.shape), stats

    return run_over_auto_axes(multiply, out, lhs, rhs, scalars, codes)


def _quantizes(
    config: DotConfig, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
) -> bool:
    """Whether the recipe quantizes operands of these shapes; warns if it does not."""
    recipe = config.recipe
    if recipe.where_slower == "quantize":
        return True
    if 0 in (sizes := arguments.sizes(lhs, arguments.output(lhs, rhs))):
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
    scalars: Scalars, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
) -> tuple[jax.Array, Stats]:
    """``lax.dot_general``, and the stats of a call that has no blocks."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    y = lax.dot_general(
        lhs.astype(dtype),
        rhs.astype(dtype),
        arguments.dimension_numbers,
        preferred_element_type=arguments.preferred_element_type,
        out_sharding=arguments.out_sharding,
    )
    _, (batch, _) = arguments.dimension_numbers
    matrices = math.prod(lhs.shape[axis] for axis in batch)
    return y, threshold.without_fallback(scalars, matrices)
