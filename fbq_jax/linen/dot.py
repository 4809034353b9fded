"""Injection into Flax Linen: ``nn.Dense(..., dot_general=fallback_dot)``.

The callable is no module.  It finds the layer that calls it and keeps the layer's state
in a variable of the layer's own scope: one object serves a whole model, and no two
layers share a state.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Scope, Variable
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fbq_jax.core import threshold
from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.core.dot_general import dot_general, stateful_dot_general
from fbq_jax.core.ragged_dot import ragged_dot, stateful_ragged_dot
from fbq_jax.linen.frozen import is_frozen, layer_weight
from fbq_jax.linen.state import (
    calling_module,
    find_slot,
    return_as_gradient,
    with_floats,
)
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import layer_name


@dataclasses.dataclass(frozen=True)
class FallbackDot:
    """A quantized ``dot_general`` for Flax Linen layers.

    Inside a module the state of its layer is a dictionary
    (``fbq_jax.core.threshold.State``) in ``collection``, under the module's path.  It
    moves in an ``apply`` that makes the collection mutable, and is frozen in one that
    does not.  Outside any module there is no state: the threshold is the quantile of
    lhs' own blocks.

    The collection named ``"_overwrite_with_gradient"`` is special to Flax: its state is
    not written in ``apply`` but returned as its own gradient, which Flax's
    ``TrainState`` puts in its place, as MaxText does for models in Linen.  All of it is
    float32 then; gradients must not be summed over micro-batches, nor a layer be used
    twice in one forward.

    Attributes:
      recipe: what is quantized how.
      collection: the name of the variable collection.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; by default
        ``fbq_jax.ops.dispatch`` chooses.

    >>> layer = nn.Dense(8, dot_general=FallbackDot())
    >>> x = jax.random.normal(jax.random.key(0), (4, 16))
    >>> variables = layer.init(jax.random.key(1), x)
    >>> y, updates = layer.apply(variables, x, mutable=["fallback"])
    >>> int(updates["fallback"]["dot_general"]["count"])
    1
    """

    recipe: Recipe = fallback
    collection: str = "fallback"
    implementation: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                f"FallbackDot takes a Recipe, such as fbq_jax.recipes.fallback; got "
                f"{self.recipe!r}"
            )
        if self.collection == "params":
            raise ValueError("FallbackDot's state is no parameter: name another one")

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``lax.dot_general(lhs, rhs, ...)``, quantized; lhs is the activation."""
        module = calling_module()
        if module is None:
            return dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                recipe=self.recipe,
                out_sharding=out_sharding,
                implementation=self.implementation,
            )[0]
        variable = self.variable(module)
        rhs = jnp.asarray(rhs)  # may be a FrozenKernel, which no layer has cast
        codes = layer_weight(self, module, variable, rhs, dimension_numbers)
        state = dict(
            variable.value
        )  # plain, as its gradient is, even if it came frozen
        with layer_name("/".join(module.path) or type(module).__name__):
            out, new = stateful_dot_general(
                state,
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                recipe=self.recipe,
                out_sharding=out_sharding,
                implementation=self.implementation,
                codes=codes,
            )
        return self.commit(module, variable, new, out)

    def ragged_dot(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """``lax.ragged_dot(lhs, rhs, group_sizes, ...)``, with state as for a call.

        ``fbq_jax.ragged_dot`` says what it takes; there is no GPU kernel for it.
        """
        module = calling_module()
        if module is None:
            return ragged_dot(
                lhs,
                rhs,
                group_sizes,
                precision,
                preferred_element_type,
                recipe=self.recipe,
                implementation=self.implementation,
            )[0]
        variable = self.variable(module)
        with layer_name("/".join(module.path) or type(module).__name__):
            out, new = stateful_ragged_dot(
                dict(variable.value),
                lhs,
                rhs,
                group_sizes,
                precision,
                preferred_element_type,
                recipe=self.recipe,
                implementation=self.implementation,
            )
        return self.commit(module, variable, new, out)

    def commit(
        self,
        module: nn.Module,
        variable: Variable,
        new: threshold.State,
        out: jax.Array,
    ) -> jax.Array:
        """Puts a call's new state in the place of the old; returns the call's output.

        The state stays where it is while the module initializes, or evaluates, and in a
        frozen layer.
        """
        if module.is_initializing() or is_frozen(variable.value):
            return out
        if self.collection == OVERWRITE_WITH_GRADIENT:
            return return_as_gradient(out, dict(variable.value), with_floats(new))
        if module.is_mutable_collection(self.collection):
            variable.value = new
        return out

    def variable(self, module: nn.Module) -> Variable:
        """The variable of this call (``find_slot``)."""
        return find_slot(module, self.collection, self._start)

    def _start(self, scope: Scope, name: str) -> threshold.State:
        seed = jnp.uint32(zlib.crc32("/".join((*scope.path, name)).encode()))
        if scope.has_rng("params"):
            # Not make_rng, which would count: the layers' weights must start as those
            # of the float model do.
            key = jax.random.fold_in(scope.rngs["params"].as_jax_rng(), seed)
            seed = jax.random.bits(key, (), jnp.uint32)
        state = threshold.start(self.recipe, seed >> 8)  # 24 bits: a float holds them
        if self.collection == OVERWRITE_WITH_GRADIENT:
            return with_floats(state)
        return state


fallback_dot = FallbackDot()


def check_dot_general(taker: str, dot_general: object) -> None:
    """Refuses what cannot be called where a ``dot_general`` is taken."""
    if not callable(dot_general):
        raise TypeError(
            f"{taker} takes a dot_general, such as FallbackDot(recipe); got "
            f"{dot_general!r}"
        )
