"""The quantized ops of one Flax NNX layer, with their state."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax import lax

from fbq_jax.core import threshold
from fbq_jax.core.arguments import DimensionNumbers, DotArguments, DotGeneral
from fbq_jax.core.conv import conv_general_dilated
from fbq_jax.core.dot_general import DotConfig, LayerDot
from fbq_jax.core.einsum import QuantizedEinsum
from fbq_jax.core.frozen_weight import Axes, check_axes
from fbq_jax.core.training_warnings import needs_state, warn_if_differentiated
from fbq_jax.core.visitors import FoundCodes, visitor
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.nnx.grouped_dense import GroupedDense
from fbq_jax.nnx.op_warnings import (
    is_made_in_call,
    record_trace,
    warn_if_hidden,
    warn_if_shared,
)
from fbq_jax.nnx.plain_method import PlainMethod
from fbq_jax.ops.trace_contexts import make_trace_context
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import current_layer, layer_name

Tree = TypeVar("Tree")


class FallbackState(nnx.Variable):
    """One value of a layer's state (``fbq_jax.core.threshold.State``)."""


class FrozenCodes(nnx.Variable):
    """The codes of a frozen layer's weight, a ``Quantized`` as in ``FrozenWeight``."""


class StepCodes(nnx.Variable):
    """The codes of a weight in ``quantize_weights_once``, a ``StepWeight``."""


class KeptCodes(StepCodes):
    """The codes of a weight that a ``CodeOptimizer`` keeps."""


#: Whether a context of ``quantize_weights_once`` is active.
in_step = make_trace_context(False)
#: Whether ``evaluation`` is active.  Part of the key of JAX's trace caches: a layer
#: that was traced in training is traced again.
in_evaluation = make_trace_context(False)


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Keeps thresholds from moving in all NNX layers that run in this context.

    ``model.eval()`` does so until ``model.train()``.  This is for trainers that call
    neither, and it decorates a loss function, too:

        trainer.eval_loss_fn = fbq_jax.nnx.evaluation()(loss_fn)

    >>> layer = nnx.Linear(8, 2, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> with evaluation():
    ...     y = layer(jnp.ones((4, 8)))
    >>> int(layer.dot_general.count[...])
    0
    """
    with in_evaluation(True):
        yield


@dataclasses.dataclass(frozen=True)
class LayerPath:
    """The path of a layer, for warnings and reports only.

    All paths are equal, so that JAX compiles one function for layers that differ in
    their paths only, and can stack such layers.

    Attributes:
      path: the path, empty for a model that is a layer; None if nothing told it.
      name: what warnings call the layer, a path or the class of such a model.
    """

    path: str | None = dataclasses.field(default=None, compare=False)
    name: str | None = dataclasses.field(default=None, compare=False)


class FallbackDot(DotGeneral, nnx.Module):
    """A quantized ``dot_general`` for one NNX layer, which holds the layer's state.

    Give each layer its own instance: ``fbq_jax.nnx.fallback_stats`` raises if two
    layers share one.  ``model.eval()`` keeps the threshold and ``model.train()`` lets
    it move again, through ``use_running_average`` as in ``nnx.BatchNorm``.  Pass it to
    ``nnx.LinearGeneral`` as ``dot_general=``, because ``dot_general_cls=`` makes a new
    object in every call, which cannot keep state.

    The state may be cast to other floats of 16 bits or more, as together with the
    parameters, and keeps their dtype.  Then the threshold is rounded, to at least the
    next value in the direction in which it moves, and stays in their range.

    ``nnx.jit`` walks through the model in Python at each call, and here passes four
    scalars per layer.  Where the GPU waits for that, ``nnx.split`` the model once and
    ``jax.jit`` the step, or bind the model with ``nnx.cached_partial``.

    Args:
      recipe: how the three GEMMs are quantized.
      rngs: seeds the layer's noise from its ``params`` stream.  Without it, all layers
        draw the same noise for elements at the same position, and a gradient of the
        weight warns once.
      implementation: ``"mosaic"``, ``"triton"``, ``"tpu"`` or ``"reference"``;
        None lets ``fbq_jax.ops.dispatch`` choose.
      ignore_precision: whether to quantize products that ask for a precision, such as
        HIGHEST; otherwise they are errors.

    Attributes:
      theta: float32 ``[]``, the threshold of the next forward; -1 until it is set.
      rate: float32 ``[]``, the fallback rate of the last training forward.
      count: uint32 ``[]``, the number of training forwards.
      seed: uint32 ``[]``, seeds the layer's noise.
      use_running_average: whether the state stays as it is, as in evaluation.
      has_rngs: whether ``rngs`` seeded the noise.
      path: the layer's path, a ``LayerPath`` for warnings, from ``quantize`` or
        ``fbq_jax.nnx.name_layers``.
      weight: the codes of a frozen layer's weight, as ``FrozenCodes``; None before
        ``freeze``.
      axes: the contracting and the batch dimensions of the weight that the codes are
        for; empty before ``freeze``.
      layer: the layer's path in the model that ``freeze`` took; None before.
      step_codes: the codes of the layer's weight in ``quantize_weights_once``, as
        ``StepCodes``; None outside.

    Raises:
      TypeError: ``recipe`` is not a ``Recipe``, or ``rngs`` is not ``nnx.Rngs``.
      ValueError: no implementation has this name.

    >>> layer = nnx.Linear(8, 2, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> y = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((4, 8)))
    >>> int(layer.dot_general.count[...])
    1
    """

    def __init__(
        self,
        recipe: Recipe = fallback,
        *,
        rngs: nnx.Rngs | None = None,
        implementation: str | None = None,
        ignore_precision: bool = False,
    ):
        self.recipe, self.implementation = recipe, implementation
        self.ignore_precision = ignore_precision
        _ = self.config  # checks the recipe and the implementation
        if not isinstance(rngs, nnx.Rngs | None):
            raise TypeError(
                "rngs takes an nnx.Rngs, such as nnx.Rngs(0), or None; got "
                f"{type(rngs).__name__}"
            )
        seed = 0 if rngs is None else jax.random.bits(rngs.params(), (), jnp.uint32)
        state = threshold.start(recipe, seed)
        self.use_running_average = False
        self.has_rngs = rngs is not None
        self.theta = FallbackState(state["theta"])
        self.rate = FallbackState(state["rate"])
        self.count = FallbackState(state["count"])
        self.seed = FallbackState(state["seed"])
        self.path = LayerPath()
        # freeze sets these.
        self.weight: FrozenCodes | None = None
        self.axes: Axes = (), ()
        self.layer: str | None = None
        self.step_codes: StepCodes | None = None
        record_trace(self)

    @property
    def config(self) -> DotConfig:
        """The settings that Linen and NNX share."""
        return DotConfig(self.recipe, self.implementation, self.ignore_precision)

    @property
    def evaluates(self) -> bool:
        """Whether a call leaves the state as it is."""
        return self.use_running_average or in_evaluation.value

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Called by ``nnx.view``: True keeps the threshold, False lets it move."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def _compute(
        self, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
    ) -> jax.Array:
        """Computes the product, and updates the state in training."""
        warn_if_hidden(self)
        arguments, ignores = self.config.ignoring(arguments)
        dims = arguments.dimension_numbers
        layer = self.layer_dot(lhs, rhs, dims, ignores_precision=ignores)
        return layer.multiply(lhs, arguments)

    @PlainMethod
    def layer_dot(
        self,
        x: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        ignores_precision: bool = False,
    ) -> LayerDot:
        """The dot of the layer with this weight."""
        del x
        product = DotProduct(self, rhs, dimension_numbers, ignores_precision)
        codes: FoundCodes | None = None
        if self.layer is not None:
            product = dataclasses.replace(product, rhs=jnp.asarray(rhs))
            product = visitor.value.see(product)
            codes = visitor.value.codes(product)
        layouts, frozen = codes or self._codes(product)
        rhs = self.check_moves(product.rhs)
        return LayerDot(
            self.config,
            self.state(),
            rhs,
            layouts,
            is_frozen=frozen,
            commit=self.commit,
            named=functools.partial(self.named, _description(rhs)),
        )

    @PlainMethod
    @contextlib.contextmanager
    def named(self, description: str) -> Iterator[None]:
        """Names the layer in the warnings of ops that are traced in this context.

        A backward pass finds the layer by its ``jax.named_scope``.

        Args:
          description: what warnings call a layer without a path, after the names of
            the enclosing scopes.
        """
        scope = name = self.path.name or self.layer or ""
        path = scope if self.path.path is None else self.path.path
        if not scope:
            scope = description
            path = "/".join(filter(None, (current_layer(), description)))
            name = f"{path} (fbq_jax.nnx.name_layers gives layers their paths)"
        with layer_name(path, name), jax.named_scope(scope):
            yield

    @PlainMethod
    def shown_name(self) -> str:
        """What errors and warnings call the layer."""
        return self.path.name or current_layer() or "an nnx.FallbackDot"

    @PlainMethod
    def state(self) -> dict[str, jax.Array]:
        """The layer's ``fbq_jax.core.threshold.State``.

        Raises:
          ValueError: it has no values, as in a model of ``nnx.eval_shape``.
        """
        names = ("theta", "rate", "count", "seed")
        for name in names:
            if isinstance(getattr(self, name).get_value(), jax.ShapeDtypeStruct):
                layer = self.shown_name()
                raise ValueError(
                    f"{layer}: {name} has a shape but no value: update an abstract "
                    "model with all of its state, not with its nnx.Param alone"
                )
        return {name: getattr(self, name)[...] for name in names}

    @PlainMethod
    def check_moves(self, weight: Tree) -> Tree:
        """The layer's weight; its gradient warns if its noise repeats.

        Also warns if weights of two shapes train with this op.

        Args:
          weight: float arrays.

        Raises:
          ValueError: in training, the count is in 16 bits or less.
        """
        if self.layer is not None:
            return weight
        name = self.shown_name()
        if not self.evaluates:
            threshold.check_dtypes(self.state(), name)
            warn_if_shared(self, weight)
        if not needs_state(self.recipe):
            return weight
        if self.evaluates:
            text = (
                f"{name}: a gradient is taken in evaluation mode, so every step has "
                "the same noise and threshold: call model.train() before training"
            )
            return warn_if_differentiated("evaluation mode", text, weight)
        if not self.has_rngs:
            text = (
                f"{name}: a gradient is taken of a layer whose FallbackDot was made "
                "without rngs. All such layers draw the same noise, and one that is "
                "made anew in each call, as by dot_general_cls, draws it in every "
                "step: make one FallbackDot(rngs=rngs) for each layer, as "
                "fbq_jax.nnx.quantize(model, rules, quantize_rngs=rngs) does"
            )
            return warn_if_differentiated("without rngs", text, weight)
        if is_made_in_call(self):
            text = (
                f"{name}: a gradient is taken of a layer whose FallbackDot is made "
                "inside the function that is differentiated, as by dot_general_cls, "
                "so every step has the same noise, and its threshold is not kept: pass "
                "the layer one FallbackDot(rngs=rngs) as dot_general=, and make the "
                "model outside of that function"
            )
            return warn_if_differentiated("made in a call", text, weight)
        return weight

    @PlainMethod
    def commit(self, out: jax.Array, new: threshold.State) -> jax.Array:
        """Stores the new state of a call, except in evaluation; returns its output.

        Raises:
          ValueError: the layer runs inside a transformation of JAX that the state
            cannot leave, and its recipe needs a state.
        """
        if self.evaluates:
            return out
        # A reference to an array, which a variable may hold, takes no tangents.
        new = jax.lax.stop_gradient(threshold.keep_dtypes(self.state(), new))
        try:
            self.theta[...] = new["theta"]
            self.rate[...] = new["rate"]
            self.count[...] = new["count"]
        except TraceContextError:
            if not needs_state(self.recipe):
                return out
            threshold.raise_lost_state(self.shown_name(), NNX_TRANSFORMS)
        return out

    @PlainMethod
    def stack(self, shape: tuple[int, ...], rngs: nnx.Rngs | None) -> None:
        """Gives the state the leading axes of a stack of layers, as ``nnx.vmap`` does.

        Args:
          shape: the numbers of layers, on the leading axes of each value.
          rngs: seeds the noise of each layer, as in the constructor.
        """
        for variable in (self.theta, self.rate, self.count, self.seed):
            variable.set_value(jnp.broadcast_to(variable[...], shape))
        if rngs is not None:
            self.seed.set_value(jax.random.bits(rngs.params(), shape, jnp.uint32))

    def _codes(self, product: "DotProduct") -> FoundCodes:
        """The codes of the layer's weight, and whether the layer is frozen.

        There are none in a layer that quantizes its weight itself.
        """
        if self.weight is not None:
            layer = self.layer or self.shown_name()
            if not self.evaluates:
                raise ValueError(
                    f"layer {layer!r} is frozen and does not train: call model.eval() "
                    "on the model that freeze returned, or train the model from before"
                )
            check_axes(self.axes, product.dimension_numbers, layer)
            return Layouts(None, self.weight.get_value()), True
        if self.step_codes is None:
            return None, False
        if not in_step.value and not isinstance(self.step_codes, KeptCodes):
            raise ValueError(
                f"{product.layer} has codes of a step, and its weight may be another "
                "one by now: call nnx.split, nnx.merge and the model inside the "
                "context of fbq_jax.nnx.quantize_weights_once"
            )
        return self.step_codes.get_value().codes_for(product), False


@dataclasses.dataclass(frozen=True)
class DotProduct:
    """A product of an NNX layer.

    Attributes:
      dot: the layer's op.
      rhs: the weight, which is the right operand.
      dimension_numbers: of the product.
      ignores_precision: whether the layer asked for a precision that is ignored.
    """

    dot: FallbackDot
    rhs: jax.Array
    dimension_numbers: DimensionNumbers
    ignores_precision: bool

    @property
    def layer(self) -> str:
        """The path of the layer, or what errors call it."""
        return self.dot.layer or self.dot.shown_name()

    def operand(self) -> jax.Array:
        """The right operand of the product."""
        return self.rhs


NNX_TRANSFORMS = (
    "NNX's, such as nnx.jit and nnx.remat (in a Linen layer, fbq_jax.FallbackDot in "
    "place of fbq_jax.nnx.FallbackDot)"
)


def _description(kernel: jax.Array) -> str:
    return f"nnx.FallbackDot with a kernel {list(kernel.shape)}"


class FallbackOp(nnx.Module):
    """An op that computes one product with its own ``FallbackDot``."""

    def __init__(
        self,
        recipe: Recipe = fallback,
        *,
        rngs: nnx.Rngs | None = None,
        implementation: str | None = None,
        ignore_precision: bool = False,
    ):
        self.dot_general = FallbackDot(
            recipe,
            rngs=rngs,
            implementation=implementation,
            ignore_precision=ignore_precision,
        )

    @PlainMethod
    def check_unshared(self, weight: jax.Array) -> None:
        """Warns, once, if a weight of another shape trains with this op."""
        if not self.dot_general.evaluates:
            warn_if_shared(self, weight)


class FallbackEinsum(QuantizedEinsum, FallbackOp):
    """A quantized ``jnp.einsum`` for one ``nnx.Einsum``, which holds its state.

    The first operand is the activation (see ``fbq_jax.FallbackEinsum``).  It takes the
    arguments of ``FallbackDot``, and holds one as ``dot_general``.

    >>> op = FallbackEinsum(rngs=nnx.Rngs(0))
    >>> layer = nnx.Einsum("td,dhk->htk", (8, 2, 4), einsum_op=op, rngs=nnx.Rngs(0))
    >>> nnx.eval_shape(lambda layer: layer(jnp.ones((5, 8))), layer).shape
    (2, 5, 4)
    """

    def __call__(
        self, subscripts: str, /, *operands: jax.Array, **kwargs: Any
    ) -> jax.Array:
        """``jnp.einsum(subscripts, *operands, ...)``, quantized."""
        self.check_unshared(operands[-1])
        return super().__call__(subscripts, *operands, **kwargs)


class FallbackConv(FallbackOp):
    """A quantized ``lax.conv_general_dilated`` for one ``nnx.Conv``, with its state.

    ``fbq_jax.FallbackConv`` says what it supports and what overlapping windows cost.
    It takes the arguments of ``FallbackDot``, and holds one as ``dot_general``.

    >>> op = FallbackConv(rngs=nnx.Rngs(0))
    >>> layer = nnx.Conv(
    ...     3, 8, (4, 4), strides=4, conv_general_dilated=op, rngs=nnx.Rngs(0))
    >>> nnx.eval_shape(lambda layer: layer(jnp.ones((2, 16, 16, 3))), layer).shape
    (2, 4, 4, 8)
    """

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """``lax.conv_general_dilated(lhs, rhs, ...)``, quantized."""
        self.check_unshared(rhs)
        return conv_general_dilated(self.dot_general, lhs, rhs, *args, **kwargs)


def dot_name(parameter: str) -> str:
    """The attribute with the op of a module that multiplies by a parameter itself."""
    return f"{parameter}_dot_general"


def activations_dot_name(number: int) -> str:
    """The attribute with the op of a module's product of two activations."""
    return dot_name(f"activations_{number}")


def is_activations_dot(name: Any) -> bool:
    """Whether an attribute has the name of such an op; some names are no strings."""
    pattern = activations_dot_name(0).replace("0", r"\d+")
    return re.fullmatch(pattern, str(name)) is not None


class LayerOp(NamedTuple):
    """The op that a kind of layer multiplies with.

    Attributes:
      name: the attribute of the layer that holds the op.
      unquantized: the op in float.
      quantized: makes the quantized op.
    """

    name: str
    unquantized: Callable[..., jax.Array]
    quantized: type[FallbackDot] | type[FallbackOp]


_LINEAR = LayerOp("dot_general", lax.dot_general, FallbackDot)
#: The layers that ``quantize`` and ``freeze`` support.
LAYER_OPS = {
    nnx.Linear: _LINEAR,
    nnx.LinearGeneral: _LINEAR,
    GroupedDense: _LINEAR,
    nnx.Einsum: LayerOp("einsum_op", jnp.einsum, FallbackEinsum),
    nnx.Conv: LayerOp("conv_general_dilated", lax.conv_general_dilated, FallbackConv),
}
Layer = nnx.Linear | nnx.LinearGeneral | nnx.Einsum | nnx.Conv | GroupedDense


def layer_op(layer: Layer) -> LayerOp:
    """The op of a layer."""
    return next(op for kind, op in LAYER_OPS.items() if isinstance(layer, kind))


def dot_of(op: Any) -> FallbackDot | None:
    """The ``FallbackDot`` that an op is, or that it has; None if it has none."""
    dot = op.dot_general if isinstance(op, FallbackOp) else op
    return dot if isinstance(dot, FallbackDot) else None
