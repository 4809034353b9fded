"""Injection into Flax Linen: ``nn.Dense(..., dot_general=fallback_dot)``.

The callable is not a module.  It finds the layer that calls it and keeps the layer's
state in a variable of that layer's scope.  One object therefore serves all layers of a
model, and no two layers share state.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Scope, Variable
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fbq_jax.core import threshold
from fbq_jax.core.arguments import DimensionNumbers, DotArguments, DotGeneral
from fbq_jax.core.dot_general import (
    DotConfig,
    LayerDot,
    seeded_dot_general,
    stateless_scalars,
)
from fbq_jax.core.example_seed import example_seed
from fbq_jax.core.threshold import SLOT, layer_path
from fbq_jax.core.training_warnings import needs_state, warn_if_differentiated
from fbq_jax.core.visitors import visitor
from fbq_jax.linen.state import (
    LayerWeight,
    Parameter,
    as_float32,
    calling_module,
    can_keep_state,
    check_collection,
    check_state_gradient,
    find_variable,
    is_frozen,
    is_mutable_outside,
    kernel_of,
    lacks_state,
    return_as_gradient,
    state_of,
    temporary_variable,
)
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import layer_name

Tree = TypeVar("Tree")

#: The RNG stream that seeds the noise of layers without state.
RNG_STREAM = "fbq"


@dataclasses.dataclass(frozen=True)
class FallbackDot(DotGeneral):
    """A quantized ``dot_general`` for Flax Linen layers.

    Inside a module, the state of a layer is a dictionary
    (``fbq_jax.core.threshold.State``) in ``collection``, under the module's path.  An
    ``apply`` that makes the collection mutable updates it; any other ``apply`` leaves
    it as it is, and a gradient of the weight warns once, because its noise would be the
    same in every step.  Outside any module there is no state: the threshold is the
    quantile of lhs' own blocks, every call draws the same noise, and a gradient of the
    weight warns once.

    A recipe without fallback (``criterion=None``) has no threshold, and works without
    the collection, as with ``apply({"params": params}, x)``.  Its noise then comes from
    the RNG stream ``"fbq"``: a training step passes ``rngs={"fbq": key}`` with a new
    key.  Without the stream, the noise is the same in each call, and a gradient of the
    weight warns once, unless the recipe draws none.  A collection that is given counts
    as above, and the stream is not read.  ``init`` creates it for every recipe, even
    for one that draws no noise, so that training loops, checkpoints, ``freeze`` and
    ``fallback_stats`` do not depend on the recipe.

    Each product of a module has its own state.  States follow the order of calls: a
    module that leaves a product out, or whose methods run alone, takes another one's.
    Layers such as ``nn.Dense`` have one product each.

    Under ``nn.vmap`` every example has its own noise.  Under ``nn.scan`` the layers of
    a stack have their own noise if ``split_rngs={"params": True}``.  Inside
    ``shard_map`` and ``pmap`` each device draws its own noise and moves its own
    threshold; ``jax.lax.pmean`` of ``theta`` and ``rate`` gives all devices the mean
    threshold.

    The state may be cast to other floats of 16 bits or more, as together with the
    parameters, and keeps their dtype (see ``fbq_jax.nnx.FallbackDot``).

    Flax treats the collection ``"_overwrite_with_gradient"`` specially: ``apply`` does
    not write the new state but returns it as the gradient of the old one, and Flax's
    ``TrainState`` stores it.  All values are then float32.  Such gradients must not be
    summed over micro-batches, and a layer must not be called twice in one forward pass.

    Attributes:
      recipe: how the three GEMMs are quantized.
      collection: the name of the variable collection.
      implementation: ``"mosaic"``, ``"triton"``, ``"tpu"`` or ``"reference"``;
        None lets ``fbq_jax.ops.dispatch`` choose.
      ignore_precision: whether to quantize products that ask for a precision, such as
        HIGHEST; otherwise they are errors.

    Raises:
      TypeError: ``recipe`` is not a ``Recipe``, or ``collection`` is not text.
      ValueError: the collection is ``"params"``, or no implementation has this name;
        or, in a call, the layer has no state and its recipe has a threshold.

    >>> layer = nn.Dense(2, dot_general=FallbackDot())
    >>> x = jnp.ones((4, 8))
    >>> variables = layer.init(jax.random.key(1), x)
    >>> y, updates = layer.apply(variables, x, mutable=["fallback"])
    >>> int(updates["fallback"]["dot_general"]["count"])
    1
    """

    recipe: Recipe = fallback
    collection: str = "fallback"
    implementation: str | None = None
    ignore_precision: bool = False

    def __post_init__(self) -> None:
        _ = self.config  # checks the recipe and the implementation
        check_collection(self.collection)

    @property
    def config(self) -> DotConfig:
        """The settings that Linen and NNX share."""
        return DotConfig(self.recipe, self.implementation, self.ignore_precision)

    def _compute(
        self, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
    ) -> jax.Array:
        """Computes the product, and updates the state of the calling layer."""
        arguments, ignores = self.config.ignoring(arguments)
        dims = arguments.dimension_numbers
        layer = self.layer_dot(lhs, rhs, dims, ignores_precision=ignores)
        if layer is not None:
            return layer.multiply(lhs, arguments)
        rhs = self._without_state(rhs)
        scalars = stateless_scalars()
        return seeded_dot_general(self.config, scalars, lhs, rhs, arguments)[0]

    def layer_dot(
        self,
        x: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        as_matrix: Callable[[jax.Array], jax.Array] | None = None,
        *,
        ignores_precision: bool = False,
    ) -> LayerDot | None:
        """The dot of the calling layer; None outside any module.

        Args:
          x: the activation, or an array that it is computed from.
          rhs: the weight.
          dimension_numbers: of the product.
          as_matrix: makes the right operand of the product from ``rhs``, to quantize it
            apart from the product; None if they are the same.
          ignores_precision: whether the layer asked for a precision that is ignored.
        """
        module = calling_module(self.collection)
        if module is None:
            return None
        variable = self.variable(module, x)
        rhs = jnp.asarray(rhs)  # may be a FrozenKernel that no layer has cast
        rhs = self.check_moves(module, variable, rhs)
        with named(module):
            product = visitor.value.see(
                LayerWeight(
                    self.config,
                    module,
                    variable,
                    rhs,
                    as_matrix,
                    dimension_numbers,
                    self._parameter(module),
                    ignores_precision,
                )
            )
            codes, frozen = visitor.value.codes(product) or product.codes()
        return LayerDot(
            self.config,
            state_of(variable),
            product.rhs,
            codes,
            is_frozen=frozen,
            commit=functools.partial(self.commit, module, variable),
            named=functools.partial(named, module),
            sow=functools.partial(module.sow, "intermediates"),
        )

    def _parameter(self, module: nn.Module) -> Parameter | None:
        """The parameter that is the weight; None in a product of two activations."""
        return kernel_of(module)

    def _without_state(self, rhs: jax.Array) -> jax.Array:
        """The weight of a call outside any module, whose gradient warns."""
        if not needs_state(self.recipe):
            return rhs
        return warn_if_differentiated("without state", _NO_STATE, rhs)

    def check_moves(self, module: nn.Module, variable: Variable, weight: Tree) -> Tree:
        """The weight of a layer; its gradient warns if the state cannot move.

        Args:
          module: the calling layer.
          variable: holds its state.
          weight: float arrays.

        Raises:
          ValueError: the state can move, but its count is in 16 bits or less.
        """
        if module.is_initializing() or is_frozen(variable.value):
            return weight
        layer = f"layer {layer_path(module.path)!r}"
        if variable.scope is not module.scope:
            return self._check_noise(module, layer, weight)
        returned = self.collection == OVERWRITE_WITH_GRADIENT
        if returned or module.is_mutable_collection(self.collection):
            threshold.check_dtypes(variable.value, layer)
            if returned:
                return check_state_gradient(module, weight, dict(variable.value))
            return weight
        if not needs_state(self.recipe):
            return weight
        if is_mutable_outside(self.collection):
            text = (
                f"{layer}: a gradient is taken inside a transformation that makes the "
                f"collection {self.collection!r} immutable, as nn.WeightNorm does, so "
                "every step has the same noise and threshold. Leave the layer in "
                "float, or give it a recipe without fallback, remove its state from "
                f"the collection, and pass rngs={{{RNG_STREAM!r}: key}} with a new key "
                "in each step"
            )
            return warn_if_differentiated("immutable inside", text, weight)
        text = (
            f"{layer}: a gradient is taken while "
            f"the collection {self.collection!r} is immutable, so every step has the "
            f"same noise and threshold. Training calls apply with "
            f"mutable=[{self.collection!r}] and passes the updates to the next step"
        )
        return warn_if_differentiated("immutable", text, weight)

    def _check_noise(self, module: nn.Module, layer: str, weight: Tree) -> Tree:
        """The weight of a layer without state; its gradient warns without a key."""
        if module.has_rng(RNG_STREAM) or not needs_state(self.recipe):
            return weight
        text = (
            f"{layer}: a gradient is taken without the collection {self.collection!r}, "
            "so every step has the same noise. Training calls apply with "
            f"rngs={{{RNG_STREAM!r}: key}} and a new key in each step (split_rngs of "
            f"nn.scan and nn.vmap lists {RNG_STREAM!r}), or with the collection that "
            f"init returns and mutable=[{self.collection!r}]"
        )
        return warn_if_differentiated("without noise", text, weight)

    def commit(
        self,
        module: nn.Module,
        variable: Variable,
        out: jax.Array,
        new: threshold.State,
    ) -> jax.Array:
        """Stores the new state of a call; returns the call's output.

        The state does not change while the module initializes or evaluates, nor in a
        frozen layer.

        Args:
          module: the calling layer.
          variable: holds its state.
          out: the output of the call, which carries the state as a gradient if the
            collection asks for it.
          new: the state after a training forward.

        Raises:
          ValueError: as in the NNX op: the state cannot leave a transformation of JAX.
        """
        if module.is_initializing() or is_frozen(variable.value):
            return out
        new = threshold.keep_dtypes(variable.value, new)
        if self.collection == OVERWRITE_WITH_GRADIENT:
            return return_as_gradient(out, dict(variable.value), new)
        if module.is_mutable_collection(self.collection):
            if can_keep_state(variable.scope):
                variable.value = new
            elif needs_state(self.recipe):
                layer = f"layer {layer_path(module.path)!r}"
                instead = "Flax's, such as nn.jit, nn.remat, nn.scan and nn.cond"
                threshold.raise_lost_state(layer, instead)
        return out

    def variable(self, module: nn.Module, x: jax.Array) -> Variable:
        """The variable with the state of this call on x (``find_variable``).

        A recipe without a threshold may have none, and gets one for this call.
        """
        may_lack = self.recipe.criterion is None
        may_lack &= self.collection != OVERWRITE_WITH_GRADIENT
        if not may_lack or not lacks_state(module, self.collection):
            start = functools.partial(self._start, x)
            return find_variable(module, self.collection, start)
        if module.has_rng(RNG_STREAM):
            seed = jax.random.bits(module.make_rng(RNG_STREAM), (), jnp.uint32)
            seed = example_seed(seed, x)
            state = threshold.start(self.recipe, seed)
        else:
            assert module.scope is not None
            state = self._start(x, module.scope, SLOT)
        return temporary_variable(self.collection, state)

    def _start(self, x: jax.Array, scope: Scope, name: str) -> threshold.State:
        """The first state of the layer with this scope."""
        seed = jnp.uint32(zlib.crc32("/".join((*scope.path, name)).encode()))
        if scope.has_rng("params"):
            # make_rng would advance Flax's counter, and the layers would start with
            # other weights than in the unquantized model.
            key = jax.random.fold_in(scope.rngs["params"].as_jax_rng(), seed)
            seed = jax.random.bits(key, (), jnp.uint32)
        seed = example_seed(seed, x)
        state = threshold.start(self.recipe, seed >> 8)  # float32 holds 24 bits
        returned = self.collection == OVERWRITE_WITH_GRADIENT
        return as_float32(state) if returned else state


fallback_dot = FallbackDot()


@dataclasses.dataclass(frozen=True)
class ActivationsDot(FallbackDot):
    """A ``FallbackDot`` for a product of two activations, with no weight to freeze."""

    def _parameter(self, module: nn.Module) -> None:
        del module


@dataclasses.dataclass(frozen=True)
class ParameterDot(FallbackDot):
    """A ``FallbackDot`` for a product with a parameter in the model's own code.

    Attributes:
      parameter: the parameter.
    """

    parameter: Parameter = dataclasses.field(kw_only=True, compare=False)

    def _parameter(self, module: nn.Module) -> Parameter:
        del module
        return self.parameter


_NO_STATE = (
    "a gradient is taken of a FallbackDot outside any Linen module, where it has no "
    "state: every call has the same noise. In NNX use "
    "fbq_jax.nnx.FallbackDot(rngs=rngs) or fbq_jax.nnx.quantize; in plain JAX pass "
    "fbq_jax.dot_general a new key in each call"
)


def named(module: nn.Module) -> AbstractContextManager[None]:
    """Names a layer in warnings about the ops that it calls."""
    return layer_name(
        "/".join(module.path), None if module.path else type(module).__name__
    )


def check_dot_general(owner: str, dot_general: object) -> None:
    """Raises TypeError if the ``dot_general`` of ``owner`` is no op."""
    if isinstance(dot_general, Recipe) or not callable(dot_general):
        raise TypeError(
            f"{owner} takes a dot_general, such as FallbackDot(recipe); got "
            f"{dot_general!r}"
        )
