"""Weights that arrive quantized: a layer's state has their codes.

A frozen layer serves and no longer trains.  It keeps the codes of its weight next to
the state of its dot.  In place of the kernel it has a ``FrozenKernel``, with a shape
and a dtype but no bytes, because a layer such as ``nn.Dense`` reads its kernel and
casts it before it calls ``dot_general``.  The layer therefore computes in the same
dtypes as in training, while the dot reads the codes.

A training step may also have codes beside its kernels, for all of its microbatches.

The layers themselves make the codes, of the operand that they multiply by, when a
visitor asks them (``fbq_jax.core.visitors``).
"""

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fbq_jax.core import threshold
from fbq_jax.core.arguments import DimensionNumbers, rhs_matrix
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.gemms import Spec, quantize_rhs
from fbq_jax.core.serialization import serializable_dataclass, serializable_static
from fbq_jax.core.visitors import StandIn, Visitor, WeightCodes
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.quantized import Quantized
from fbq_jax.recipes.presets import describe_recipe
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.explicit_axes import apply_by_rows

# The contracting and the batch dimensions of a product's right operand.
Axes = tuple[tuple[int, ...], tuple[int, ...]]


@serializable_static
@dataclass(frozen=True)
class FrozenKernel(StandIn):
    """Stands in for the kernel of a frozen layer; a pytree without leaves.

    JAX reads it as an array of NaNs.  A compiled program does not compute them, because
    the dot does not read them.  Code that does read them cannot take them for weights.

    Attributes:
      shape: the kernel's shape, without the axes of stacked layers.
      dtype: the dtype of the kernel as a parameter.
    """

    shape: tuple[int, ...]
    dtype: Any

    def __jax_array__(self) -> jax.Array:
        return self.nans()

    def nans(self) -> jax.Array:
        """What it is as an array: NaNs, or zeros if JAX stops at NaNs.

        Its layer casts it, and reads nothing but its shape and dtype.
        """
        debugs_nans = jax.config.jax_debug_nans  # type: ignore[attr-defined]
        value = 0.0 if debugs_nans else jnp.nan
        return jnp.full(self.shape, value, self.dtype)

    def __getitem__(self, index: Any) -> "FrozenKernel":
        """``kernel[...]``, as NNX layers read their variables."""
        if index is not ...:
            raise TypeError(
                "a frozen kernel takes the index ... only: its layer holds codes in "
                f"place of elements; got {index!r}"
            )
        return self


@serializable_dataclass("codes")
@dataclass(frozen=True)
class FrozenWeight(WeightCodes):
    """A layer's weight as its forward GEMM reads it.

    Attributes:
      codes: the colwise codes of W, ``[B, N, K]``, with a leading axis of layers if
        layers are stacked; ``codes.mT`` is W.
      recipe: the recipe that quantized it.
      shape: the shape of the layer's kernel.
      axes: the contracting and the batch dimensions of the dot's right operand.
      parameter: the path of the kernel inside a Linen layer.
      kept: whether a Linen model keeps the kernel, because something else reads it.
    """

    codes: Quantized
    recipe: Recipe
    shape: tuple[int, ...]
    axes: Axes
    parameter: str = "kernel"
    kept: bool = False
    is_frozen: ClassVar[bool] = True

    def codes_for(self, product: Any) -> Layouts:
        """The codes, for the product of a Linen layer (``LayerWeight``).

        Raises:
          ValueError: the layer trains, has another recipe, parameter or product than
            the codes are of, or has its kernel, too.
        """
        layer, recipe = product.layer, product.config.recipe
        if not product.has_stand_in and not self.kept:
            raise has_both(layer)
        if product.trains:
            raise ValueError(
                f"layer {layer!r} is frozen and does not train: call apply without "
                f"mutable=[{product.collection!r}], or train with the variables from "
                "before freeze"
            )
        if recipe != self.recipe:
            raise ValueError(
                f"layer {layer!r} was frozen with {describe_recipe(self.recipe)}, "
                f"and its model has {describe_recipe(recipe)}: use the recipe that it "
                "was trained with"
            )
        if self.parameter != product.parameter_name:
            raise ValueError(
                f"layer {layer!r} has the codes of {self.parameter!r}, but multiplies "
                f"by {product.parameter_name!r}: call the methods that freeze was given"
            )
        check_axes(self.axes, product.dimension_numbers, layer)
        return Layouts(None, self.codes)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes"],
    meta_fields=["axes", "dtype", "config", "parameter", "as_matrix"],
)
@dataclass(frozen=True)
class StepWeight(WeightCodes):
    """The codes of a layer's weight beside its floats, for all calls of a step.

    Attributes:
      codes: the codes that the layer's forward and backward products read.
      axes: the contracting and the batch dimensions of the product's right operand.
      dtype: the dtype of the right operand.
      config: how the layer quantizes.
      parameter: the path of the weight in the parameters of the model.
      as_matrix: makes the right operand from the weight; None if they are the same.
    """

    codes: Layouts
    axes: Axes
    dtype: Any
    config: DotConfig
    parameter: tuple[str, ...] = ()
    as_matrix: Callable[[jax.Array], jax.Array] | None = None

    def of(self, weight: jax.Array) -> "StepWeight":
        """The codes of another weight, which may be a stack of layers."""

        def quantize(weight: jax.Array) -> Layouts:
            operand = weight.astype(self.dtype)
            if self.as_matrix is not None:
                operand = self.as_matrix(operand)
            contract, batch = self.axes
            dims = (contract, contract), (batch, batch)
            return quantize_step_weight(self.config, operand, dims).codes

        stacked = jax.tree.leaves(self.codes)[0].ndim - 3
        for _ in range(stacked):
            quantize = jax.vmap(quantize)
        return replace(self, codes=quantize(weight))

    def codes_for(self, product: Any) -> Layouts:
        """The codes, for a product of a layer.

        Raises:
          ValueError: they are of a weight of another shape or dtype, or of another
            product.
        """
        layer, dims = product.layer, product.dimension_numbers
        check_axes(self.axes, dims, layer)
        w = jax.eval_shape(lambda: rhs_matrix(product.operand(), dims))
        batch, rows, columns = w.shape
        rowwise, colwise = (x and x.shape for x in self.codes[:2])
        fits = rowwise in (None, w.shape) and colwise in (None, (batch, columns, rows))
        if not fits or self.dtype != w.dtype:
            raise ValueError(
                f"layer {layer!r} multiplies by {w.dtype}{list(w.shape)} and has codes "
                f"of {self.dtype}{list(rowwise or colwise or ())}: call "
                "quantize_weights_once with arguments of the types that the step "
                "passes, and slice codes of stacked layers as their parameters"
            )
        self._check_live(product)
        return self.codes

    def _check_live(self, product: Any) -> None:
        """Raises ValueError if the codes are seen to be of another weight."""
        leaves = (product.rhs, *jax.tree.leaves(self.codes))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return  # its values are not known here
        dims = product.dimension_numbers
        fresh = quantize_step_weight(self.config, product.operand(), dims)
        if differ(self.codes, fresh.codes):
            raise ValueError(
                f"layer {product.layer!r} has codes of another weight: make codes of "
                "these parameters with write_codes (fbq_jax.optim, fbq_jax.nnx)"
            )


def has_both(layer: str) -> ValueError:
    """The error of a layer with codes of a frozen weight and its kernel."""
    return ValueError(
        f"layer {layer!r} has both the codes of a frozen weight and an unquantized "
        "kernel: pass apply either all collections that freeze returned, or all from "
        "before"
    )


@dataclass(eq=False)
class Making(Visitor):
    """A visitor for which layers make codes of their weights.

    Attributes:
      layers: the paths of the layers that make codes; None for all layers.
      made: maps the path of each layer that made codes to what says how: the axes of
        the right operand and, in NNX, the shapes of the codes, in Linen the parameter.
      left: the paths of layers that make none.
    """

    layers: Collection[str] | None = None
    made: dict[str, tuple[Axes, Any]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def add(self, layer: str, dimension_numbers: DimensionNumbers, what: Any) -> None:
        """Adds a layer that makes codes.

        Raises:
          ValueError: it multiplies by its weight in two ways.
        """
        if layer in self.made:
            check_axes(self.made[layer][0], dimension_numbers, layer)
        self.made[layer] = rhs_axes(dimension_numbers), what

    def check_all_ran(self) -> None:
        """Raises ValueError if a layer to freeze did not run."""
        known = {*self.made, *self.left}
        if idle := [layer for layer in self.layers or () if layer not in known]:
            raise ValueError(
                f"the call that freeze was given does not run {', '.join(idle)}; pass "
                "arguments (or, in Linen, a method=) that run every quantized layer, "
                "and the quantized model, not the one that quantize was given"
            )


def quantize_weight(
    config: DotConfig,
    state: Mapping[str, Any],
    w: jax.Array,
    dimension_numbers: DimensionNumbers,
) -> FrozenWeight:
    """Quantizes the right operand of a layer's next product as the product would.

    Args:
      config: the recipe, with a forward GEMM in INT8, and the implementation.
      state: the layer's ``threshold.State``, which seeds the noise.
      w: the operand, of any rank, in the dtype that the layer computes in.
      dimension_numbers: the product's, as in ``lax.dot_general``.
    """
    recipe = config.recipe
    seed = threshold.call_seed(threshold.canonicalize_state(state))
    matrices = rhs_matrix(w, dimension_numbers)
    dtype = matrices.dtype
    spec = Spec(recipe, dtype, dtype, dtype, config.implementation)
    codes = quantize_rhs(spec, matrices, None, seed, save=False).colwise
    assert codes is not None
    # Stored weights have the same arrays, whatever device freezes them.
    codes = replace(codes, main=codes.main._replace(sums=None))
    return FrozenWeight(codes, recipe, w.shape, rhs_axes(dimension_numbers))


def differ(a: Any, b: Any) -> jax.Array:
    """Whether two weights of a layer have other codes."""
    if jax.tree.map(jnp.shape, a) != jax.tree.map(jnp.shape, b):
        return jnp.array(True)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    # A NaN, which is the scale of a block with one, equals itself here.
    equal = [jnp.array_equal(x, y, equal_nan=True) for x, y in pairs]
    return ~jnp.all(jnp.stack(equal))


def rhs_axes(dimension_numbers: DimensionNumbers) -> Axes:
    """The axes of the right operand that determine the order of its codes."""
    (_, contract), (_, batch) = dimension_numbers
    return tuple(contract), tuple(batch)


def check_axes(axes: Axes, dimension_numbers: DimensionNumbers, layer: str) -> None:
    """Raises ValueError if a layer's codes do not have the axes of this product."""
    if (others := rhs_axes(dimension_numbers)) != axes:
        raise ValueError(
            f"layer {layer!r} has codes for one product, over the axes {axes[0]} of "
            f"its kernel (batch {axes[1]}), but computes another, over {others[0]} "
            f"(batch {others[1]}): codes are for layers that multiply by their kernel "
            "in one way"
        )


def check_recipe(recipe: Recipe, layer: str) -> None:
    """Raises ValueError if the recipe's forward pass may not quantize the weight."""
    if recipe.fwd.in_floats:
        raise ValueError(
            f"layer {layer!r} has no codes to freeze: its recipe leaves the forward "
            "pass unquantized (Recipe.fwd); freeze takes recipes with an INT8 forward "
            "pass"
        )
    if recipe.where_slower != "quantize":
        raise ValueError(
            f"layer {layer!r} has a recipe with where_slower={recipe.where_slower!r}, "
            "and a frozen layer always multiplies by its codes; freeze takes the model "
            "with where_slower='quantize', in which rules leave layers in float"
        )


def check_thetas(states: Mapping[str, tuple[Recipe, Any]]) -> None:
    """Raises ValueError if a layer with fallback has no threshold yet.

    Args:
      states: maps each layer's path to its recipe and theta; a traced theta passes.
    """
    unset = [
        layer
        for layer, (recipe, theta) in states.items()
        if recipe.criterion is not None
        and not isinstance(theta, jax.core.Tracer)
        and not bool(jnp.all(theta > 0.0))
    ]
    if unset:
        raise ValueError(
            "freeze takes trained layers; there is no threshold yet (theta is not "
            f"above 0) in: {', '.join(unset)}. Run a training forward, with "
            "activations that are finite and not all zero, or set Recipe.start"
        )


def as_array(x: Any) -> Any:
    """Zeros for a ``jax.ShapeDtypeStruct``: the values do not affect the weights."""
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


def quantize_step_weight(
    config: DotConfig, w: jax.Array, dimension_numbers: DimensionNumbers
) -> StepWeight:
    """Quantizes the right operand of a product, rounded to nearest, as it would."""
    spec = Spec(config.recipe, w.dtype, w.dtype, w.dtype, config.implementation)

    def quantize(matrices: jax.Array) -> Layouts:
        no_seed = jnp.zeros((), jnp.uint32)  # nearest rounding draws no noise
        return quantize_rhs(spec, matrices, None, no_seed, save=True)

    def specs_of(batch: Any, rows: Any, columns: Any) -> Layouts:
        specs: Any = P(batch, rows, columns), P(batch, columns, rows)
        return Layouts(*specs)

    matrices = rhs_matrix(w, dimension_numbers)
    codes = apply_by_rows(quantize, matrices, specs_of=specs_of)
    return StepWeight(codes, rhs_axes(dimension_numbers), w.dtype, config)


def quantizes_weights(recipe: Recipe) -> bool:
    """Whether a recipe quantizes weights at all."""
    return (recipe.fwd.rhs, recipe.dlhs.rhs) != (None, None)


def has_constant_codes(recipe: Recipe) -> bool:
    """Whether each call with a weight has the same codes of it."""
    roundings = recipe.fwd.rhs, recipe.dlhs.rhs
    return recipe.where_slower == "quantize" and "stochastic" not in roundings


def check_found(codes: object, left: Collection[str], stacklevel: int) -> None:
    """Warns about layers that ``quantize_weights_once`` leaves out.

    Args:
      codes: what it made; empty for none.
      left: the paths of layers that will quantize their weights in every call.
      stacklevel: of the warning, in the caller.

    Raises:
      ValueError: there are neither codes nor such layers.
    """
    if not codes and not left:
        raise ValueError(
            "quantize_weights_once found no layer that quantizes its kernel with a "
            "FallbackDot: pass the quantized model, and arguments that run its layers"
        )
    if left:
        warnings.warn(
            f"these layers quantize their weights in every call: "
            f"{', '.join(sorted(left))}. quantize_weights_once takes layers of Flax "
            "and fbq_jax that multiply by their parameter 'kernel' in this call, with "
            "nearest rounding and where_slower='quantize'",
            stacklevel=stacklevel + 1,
        )
