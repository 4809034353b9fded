"""INT8 weights of frozen layers, which serve and no longer train.

A frozen layer keeps the codes of its weight next to the state of its dot.  In place of
the kernel it has a ``FrozenKernel``, with a shape and a dtype but no bytes, because a
layer such as ``nn.Dense`` reads its kernel and casts it before it calls
``dot_general``.  The layer therefore computes in the same dtypes as in training, while
the dot reads the codes.

``freeze`` learns how a layer multiplies (dtype, contracted axes) by tracing the model
under ``record_weights``: every quantized layer reports its weight to the recorder.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.core import threshold
from fbq_jax.core.dimension_numbers import DimensionNumbers, rhs_matrix
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.gemms import quantize_rhs
from fbq_jax.core.serialization import serializable_dataclass, serializable_static
from fbq_jax.core.spec import Spec
from fbq_jax.quantized import Quantized
from fbq_jax.recipes.schema import Recipe

# The contracting and the batch dimensions of a product's right operand.
Axes = tuple[tuple[int, ...], tuple[int, ...]]


@serializable_static
@dataclass(frozen=True)
class FrozenKernel:
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
class FrozenWeight:
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


@dataclass(frozen=True)
class ViewStep:
    """A primitive of JAX between a parameter and the operand of a product.

    Attributes:
      primitive: takes the array and the other operands.
      operands: the other operands.
      params: the parameters of the primitive, sorted.
    """

    primitive: Any
    operands: tuple[Any, ...]
    params: tuple[tuple[str, Any], ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes the step."""
        return self.primitive.bind(x, *self.operands, **dict(self.params))


View = tuple[ViewStep, ...]


@dataclass(frozen=True)
class WeightUse:
    """How a layer multiplies by its weight.

    Attributes:
      shape: the shape of the right operand, without the axes of stacked layers.
      dtype: the dtype of the right operand.
      dimension_numbers: the product's, as in ``lax.dot_general``.
      view: the steps from the parameter to the right operand, if the model's own code
        takes them; casts and reshapes of layers are none.
      parameter: the path of the parameter, if a Linen model's own code multiplies by
        it; otherwise empty.
    """

    shape: tuple[int, ...]
    dtype: Any
    dimension_numbers: DimensionNumbers
    view: View = ()
    parameter: tuple[str, ...] = ()


class WeightRecorder:
    """Collects how layers multiply by their weights while their model is traced.

    Attributes:
      uses: maps the path of each layer to freeze to its use; None until the layer ran.
      view: the view of the product that is being traced.
      borrowing: the paths of layers that multiply by a weight of another module.
      shared: the paths of Linen layers whose steps or examples share their weight.
    """

    def __init__(self, layers: Iterable[str], shared: Iterable[str] = ()):
        self.shared = frozenset(shared)
        self.uses: dict[str, WeightUse | None] = dict.fromkeys(layers)
        self.view: View = ()
        self.borrowing: set[str] = set()

    def report(
        self,
        layer: str,
        weight: jax.Array,
        dimension_numbers: DimensionNumbers,
        parameter: tuple[str, ...] = (),
    ) -> bool:
        """Records a layer's product; returns whether ``freeze`` freezes the layer.

        Args:
          layer: the layer's path.
          weight: the right operand of the product.
          dimension_numbers: the product's.
          parameter: the ``parameter`` of its ``WeightUse``.

        Raises:
          ValueError: the layer multiplies by its weight in two ways.
        """
        view, self.view = self.view, ()
        if layer not in self.uses:
            return False
        if (earlier := self.uses[layer]) is not None:
            check_axes(rhs_axes(earlier.dimension_numbers), dimension_numbers, layer)
        if earlier is not None and earlier.parameter != parameter:
            raise ValueError(
                f"layer {layer!r} has one state for products with several parameters, "
                f"{'/'.join(earlier.parameter)!r} and {'/'.join(parameter)!r}: freeze "
                "takes layers whose products each have a state of their own"
            )
        chosen = any(
            isinstance(operand, jax.core.Tracer)
            for step in view
            for operand in step.operands
        )
        same = [
            use
            for use in self.uses.values()
            if use is not None and parameter and use.parameter == parameter
        ]
        if earlier is not None:
            same.append(earlier)
        if chosen or any(use.view != view for use in same):
            raise ValueError(
                f"layer {layer!r} multiplies by several parts of its parameter: freeze "
                "takes layers that multiply by it in one way"
            )
        self.uses[layer] = WeightUse(
            weight.shape, weight.dtype, dimension_numbers, view, parameter
        )
        return True

    def skip(self, layer: str) -> None:
        """Leaves out a layer that multiplies by no weight."""
        self.uses.pop(layer, None)

    def check_all_ran(self) -> None:
        """Raises ValueError if a layer to freeze did not run."""
        if idle := [layer for layer, use in self.uses.items() if use is None]:
            raise ValueError(
                f"the call that freeze was given does not run {', '.join(idle)}; pass "
                "arguments (or, in Linen, a method=) that run every quantized layer, "
                "and the quantized model, not the one that quantize was given"
            )


# Part of the key of JAX's trace caches: a layer that was traced before is traced again.
_recorder = jax.make_user_context(None)


@contextlib.contextmanager
def record_weights(
    layers: Iterable[str], shared: Iterable[str] = ()
) -> Iterator[WeightRecorder]:
    """Makes layers that are traced inside report to the recorder that it yields."""
    recorder = WeightRecorder(layers, shared)
    with _recorder(recorder):
        yield recorder


def active_recorder() -> WeightRecorder | None:
    """The recorder to report to; None unless ``freeze`` traces a model."""
    return _recorder.value


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
