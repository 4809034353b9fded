"""What is trained is what is served: ``freeze`` for Flax NNX."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import nnx

from fbq_jax import threshold
from fbq_jax.frozen import (
    FrozenKernel,
    check_recipe,
    check_thetas,
    quantize_weight,
    zeros,
)
from fbq_jax.matrices import DimensionNumbers
from fbq_jax.qtensor import QTensor
from fbq_jax.recipe import Recipe

M = TypeVar("M", bound=nnx.Module)

LAYERS = (nnx.Linear, nnx.LinearGeneral)


class FrozenCodes(nnx.Variable):
    """The codes of a frozen layer's weight, a ``QTensor`` as in ``FrozenWeight``."""


@dataclass(eq=False)
class _Call:
    """How a layer multiplies, which it writes down when it is traced."""

    shape: tuple[int, ...] = ()
    dtype: Any = None
    dimension_numbers: DimensionNumbers | None = None


class FreezableDot(nnx.Module):
    """A ``dot_general`` whose weight ``freeze`` can turn into codes."""

    theta: nnx.Variable
    rate: nnx.Variable
    count: nnx.Variable
    seed: nnx.Variable
    use_running_average: bool

    def __init__(self, recipe: Recipe, implementation: str | None):
        self.recipe = recipe
        self.implementation = implementation
        self.weight: FrozenCodes | None = None
        self.call: _Call | None = None

    def state(self) -> dict[str, jax.Array]:
        """What the layer carries on: ``fbq_jax.threshold.State``."""
        names = ("theta", "rate", "count", "seed")
        return {name: getattr(self, name)[...] for name in names}

    def codes_of(
        self, rhs: jax.Array, dimension_numbers: DimensionNumbers
    ) -> QTensor | None:
        """The codes by which the layer multiplies, or None if it is not frozen."""
        if self.call is not None:
            self.call.shape, self.call.dtype = rhs.shape, rhs.dtype
            self.call.dimension_numbers = dimension_numbers
        if self.weight is None:
            return None
        if not self.use_running_average:
            raise ValueError(
                "a frozen layer does not train: leave the model that freeze returned "
                "in evaluation (model.eval()), or train the one from before"
            )
        return self.weight.get_value()


def freeze(model: M, *args: Any, **kwargs: Any) -> M:
    """Turns the weights of a model's quantized layers into INT8 codes and scales.

    ``fbq_jax.freeze`` for NNX.  The layers are ``nnx.Linear`` and ``nnx.LinearGeneral``
    (also those of attention) that multiply by a ``fbq_jax.nnx.FallbackDot``.  They lose
    their kernel; codes and scales are the variable ``dot_general.weight``.

    For a model as abstract as restoring a checkpoint needs it,
    ``nnx.eval_shape(lambda: freeze(Model(rngs=nnx.Rngs(0)), x))``.

    Args:
      model: the one that was trained, which is left as it is.
      *args: what it takes for a call that runs every layer; a ``jax.ShapeDtypeStruct``
        will do for an array.
      **kwargs: likewise.

    Returns:
      A model of the same class, in evaluation.

    Raises:
      ValueError: no layer multiplies by a ``FallbackDot``, or one is frozen already,
        has no threshold yet, has a recipe that multiplies in floats in the forward
        pass, or does not run.

    >>> import jax.numpy as jnp
    >>> from fbq_jax.nnx import FallbackDot
    >>> x = jax.random.normal(jax.random.key(0), (32, 128))
    >>> layer = nnx.Linear(128, 64, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> _ = layer(x)  # trains
    >>> frozen = freeze(layer, x)
    >>> layer.eval()
    >>> bool(jnp.all(frozen(x) == layer(x)))
    True
    """
    model = nnx.clone(model)
    model.eval()
    layers = _find_layers(model)
    for layer in layers.values():
        layer.dot_general.call = _Call()
    args, kwargs = jax.tree.map(zeros, (args, kwargs))
    nnx.eval_shape(lambda model: model(*args, **kwargs), model)
    for name, layer in layers.items():
        _freeze_layer(name, layer)
    return model


def _find_layers(model: nnx.Module) -> dict[str, Any]:
    """Path to layer, of those that multiply by a dot that can be frozen."""
    layers: dict[str, Any] = {}
    thetas = {}
    for path, layer in nnx.iter_modules(model):
        dot = vars(layer).get("dot_general")
        if not isinstance(dot, FreezableDot):
            continue
        name = "/".join(map(str, path)) or "(root)"
        if not isinstance(layer, LAYERS):
            raise ValueError(
                f"freeze takes nnx.Linear and nnx.LinearGeneral; {name!r} is a "
                f"{type(layer).__name__}"
            )
        if dot.weight is not None:
            raise ValueError(f"freeze takes a model once; {name!r} is frozen")
        check_recipe(dot.recipe, name)
        thetas[name] = dot.recipe, dot.theta[...]
        layers[name] = layer
    if not layers:
        raise ValueError("freeze found no layer that multiplies by a FallbackDot")
    check_thetas(thetas)
    return layers


def _freeze_layer(name: str, layer: Any) -> None:
    dot, kernel = layer.dot_general, layer.kernel[...]
    call, dot.call = dot.call, None
    if call.dimension_numbers is None:
        raise ValueError(
            f"the call that freeze was given does not run {name!r}; pass arguments "
            "that run every quantized layer"
        )

    def quantize(kernel: jax.Array, state: dict[str, jax.Array]) -> QTensor:
        return quantize_weight(
            kernel.astype(call.dtype),
            call.dimension_numbers,
            threshold.call_seed(threshold.clean(state)),
            recipe=dot.recipe,
            implementation=dot.implementation,
        ).codes

    for _ in range(kernel.ndim - len(call.shape)):  # axes of stacked layers
        quantize = jax.vmap(quantize)
    dot.weight = nnx.data(FrozenCodes(quantize(kernel, dot.state())))
    layer.kernel = FrozenKernel(call.shape, kernel.dtype)
