"""Traces calls of NNX models: their products, and the codes of their weights.

The models do not change.  Arrays among the arguments of a call may be
``jax.ShapeDtypeStruct``.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

from fbq_jax.core import threshold
from fbq_jax.core.frozen_weight import (
    Making,
    differ,
    quantize_step_weight,
    quantize_weight,
)
from fbq_jax.core.threshold import ROOT
from fbq_jax.core.tracing import (
    OUTPUTS,
    find_dependents,
    find_readers,
    split_arrays,
    trace,
)
from fbq_jax.core.visitors import FoundCodes, Visitor, visiting
from fbq_jax.nnx.dot import (
    NNX_TRANSFORMS,
    DotProduct,
    FallbackState,
    FrozenCodes,
    StepCodes,
    dot_name,
    is_activations_dot,
)
from fbq_jax.nnx.naming import dots_by_path, module_path, modules_of
from fbq_jax.recipes.rules_report import QuantizedParameter, is_adapter

# The attribute of an op with the codes that it is making.
_MADE = "made"


def split_model(model: nnx.Module) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A call of a model as a function of its variables, and these by their paths.

    The function takes the variables, arguments and keyword arguments.  It returns the
    outputs, and the variables afterwards that are no parameters.
    """
    split: Any = nnx.split(model)
    graphdef, state = split
    flat = {_join(path): (path, value) for path, value in nnx.to_flat_state(state)}

    def call(variables: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        state = {flat[name][0]: value for name, value in variables.items()}
        model: Any = nnx.merge(graphdef, nnx.from_flat_state(state))
        outputs = model(*args, **kwargs)
        return outputs, nnx.state(model, nnx.Not(nnx.Param))

    return call, {name: value for name, (_, value) in flat.items()}


def name_ops(model: nnx.Module) -> nnx.Module:
    """A copy of a model whose ops know their paths, by which they tell of themselves.

    JAX traces it anew, and each of its layers, because the paths are static.
    """
    model = nnx.clone(model)
    for path, dot in dots_by_path(model).items():
        dot.layer = dot.layer or path
    return model


def trace_call(model: nnx.Module, args: Any, kwargs: Any) -> None:
    """Traces a call of a model, and computes nothing."""
    call, variables = split_model(model)

    def run(*inputs: Any) -> None:
        call(*inputs)

    trace(run, variables, args, kwargs)


@dataclasses.dataclass(eq=False)
class ProductRecorder(Visitor):
    """Records the quantized products, without their rules."""

    products: list[QuantizedParameter] = dataclasses.field(default_factory=list)

    def see(self, product: Any) -> Any:
        """Records a product."""
        if isinstance(product, DotProduct):
            layer, shape, recipe = product.layer, product.rhs.shape, product.dot.recipe
            row = layer, shape, layer, None, recipe, product.ignores_precision
            self.products.append(QuantizedParameter(*row))
        return product


def trace_products(
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recorder: ProductRecorder | None = None,
) -> list[QuantizedParameter]:
    """The quantized products of a call, without their rules.

    A ``recorder`` may record more of the trace.
    """
    with visiting(recorder or ProductRecorder()) as recorder:
        trace_call(name_ops(model), args, kwargs)
    modules, dots = modules_of(model), dots_by_path(model)
    names = parameter_paths(model)
    products = []
    for product in recorder.products:
        path = "" if product.layer == ROOT else product.layer
        size = math.prod(product.shape) * math.prod(dots[product.layer].theta.shape)
        if not path.endswith(dot_name("")):
            weights = {
                name: value
                for name, value in vars(modules[path]).items()
                if isinstance(value, nnx.Param) and value.size == size
            }
        else:  # the op of a parameter, or of a product of two activations
            path, _, name = path.rpartition("/")
            if is_activations_dot(name):
                continue
            name = name.removesuffix(dot_name(""))
            weights = {name: getattr(modules[path], name)}
        known = [weights["kernel"]] if "kernel" in weights else [*weights.values()]
        parameter = names[id(known[0])] if len(known) == 1 else path
        products.append(product._replace(layer=path, parameter=parameter))
    return products


def matrices_of(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that have two or more axes in one layer.

    A parameter with the axes of a stack is one of its layers' if the layers around it
    are in that stack.
    """
    stacks, shapes = stacks_of(model), {}
    for keys, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Param)):
        path = _join(k.key for k in keys if isinstance(k, jax.tree_util.DictKey))
        stack = stack_around(stacks, path.rpartition("/")[0])
        if leaf.ndim - len(stack) * (set(stack) <= set(leaf.shape)) >= 2:
            shapes[path] = leaf.shape
    return shapes


def stacks_of(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The axes of the stacks that quantized layers are in, by the layers' paths."""
    dots = dots_by_path(model).items()
    return {module_path(path): dot.theta.shape for path, dot in dots}


def stack_around(stacks: Mapping[str, tuple[int, ...]], module: str) -> tuple[int, ...]:
    """The axes of the stacks that a module is in, given the stacks of some modules."""
    inside = [x for path, x in stacks.items() if f"{path}/".startswith(f"{module}/")]
    if inside or not module:
        return min(inside, key=len, default=())
    return stack_around(stacks, module.rpartition("/")[0])


def matrices(module: nnx.Module) -> Iterator[tuple[str, nnx.Param[Any]]]:
    """The parameters of two or more dimensions that a module multiplies by itself.

    ``ToNNX`` leaves that to the Linen module inside, whose variables all its attributes
    are.
    """
    if isinstance(module, nnx.bridge.ToNNX):
        return
    for name, value in vars(module).items():
        if not isinstance(value, nnx.Param) or is_adapter(str(name)):
            continue
        if getattr(value, "ndim", 0) >= 2:
            yield name, value


def parameter_paths(model: nnx.Module) -> dict[int, str]:
    """The path of each parameter, by its ``id``.

    Layers may share a parameter, which has the path of the first one only.
    """
    return {
        id(value): _join(path)
        for path, value in nnx.iter_graph(model)
        if isinstance(value, nnx.Param)
    }


def read_parameters(
    model: nnx.Module, names: Iterable[str], args: Any, kwargs: Any
) -> list[str]:
    """The parameters, of those with the given paths, that a call reads."""
    call, others = split_model(name_ops(model))
    values = {name: others.pop(name) for name in dict.fromkeys(names)}

    def run(values: dict[str, Any], inputs: Any) -> Any:
        others, args, kwargs = inputs
        return call({**others, **values}, args, kwargs)

    return find_readers(run, values, (others, args, kwargs), ())


def changing_weights(
    model: nnx.Module, layers: Iterable[str], args: Any, kwargs: Any
) -> list[str]:
    """The layers whose weights depend on more than parameters ``kernel``."""
    call, variables = split_model(name_ops(model))
    changing = {
        name: variables.pop(name)
        for name, value in list(variables.items())
        if not name.endswith("kernel") and not isinstance(value, FallbackState)
    }

    def run(moving: Any, fixed: Any) -> Any:
        changing, args, kwargs = moving
        return call({**changing, **fixed}, args, kwargs)

    moving = changing, args, kwargs
    return sorted(find_dependents(run, moving, variables, list(layers)) - {OUTPUTS})


@dataclasses.dataclass(eq=False)
class MakingCodes(Making):
    """The visitor of ``freeze``, or of a training step, for NNX.

    Attributes:
      for_step: whether the codes are for a training step; otherwise for ``freeze``.
    """

    for_step: bool = False

    @property
    def freezes(self) -> bool:  # type: ignore[override]
        """Whether the codes are for ``freeze``."""
        return not self.for_step

    def codes(self, product: Any) -> FoundCodes | None:
        """Makes the codes of a layer's weight; the layer itself reads none.

        They go to the variable ``_MADE``, if there is one to take them, with 0 before a
        product, 1 after it, and 2 after products with several weights.

        Raises:
          ValueError: the codes of a stack are not sliced as its parameters.
        """
        if not isinstance(product, DotProduct) or product.layer not in (
            self.layers or ()
        ):
            return None
        dot, layer, dims = product.dot, product.layer, product.dimension_numbers
        weight: Any
        if self.for_step:
            weight = quantize_step_weight(dot.config, product.rhs, dims)
        else:
            weight = quantize_weight(dot.config, dot.state(), product.rhs, dims).codes
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weight)
        self.add(layer, dims, shapes)
        if (made := getattr(dot, _MADE, None)) is not None:
            self._store(layer, made, weight)
        return None, False

    def _store(self, layer: str, made: nnx.Variable[Any], weight: Any) -> None:
        codes, count = made.get_value()
        if jax.tree.map(jnp.shape, codes) != jax.tree.map(jnp.shape, weight):
            raise ValueError(
                f"layer {layer!r} is one of a stack, whose codes are not sliced: slice "
                "codes of stacked layers as their parameters"
            )
        if not self.for_step:
            again = jnp.where(differ(codes, weight), 2, count)
            count = jnp.where(count == 0, 1, again)
        try:
            made.set_value((weight, count))
        except TraceContextError:
            if not self.for_step:
                threshold.raise_lost_state(f"layer {layer!r}", NNX_TRANSFORMS)
            self.left.add(layer)


def make_weights(
    model: nnx.Module, making: "MakingCodes", args: Any, kwargs: Any
) -> dict[str, Any]:
    """The codes that the layers of a model make of their weights, by their paths.

    The ops have the paths that ``making`` asks for.  A call of the model is compiled,
    of which XLA keeps only what makes the codes.
    """
    with visiting(making):
        trace_call(model, args, kwargs)
        graphdef, state = nnx.split(model)
        arrays, rebuild = split_arrays((state, args, kwargs))

        @jax.jit
        def run(arrays: list[Any]) -> dict[str, Any]:
            state, args, kwargs = rebuild(arrays)
            model: Any = nnx.merge(graphdef, state)
            _make_places(model, making)
            model(*args, **kwargs)
            return {
                str(dot.layer): getattr(dot, _MADE).get_value()
                for dot in dots_by_path(model).values()
                if hasattr(dot, _MADE)
            }

        weights = run(arrays)
    for layer, (_, count) in weights.items():
        if not isinstance(count, jax.core.Tracer) and np.any(np.asarray(count) > 1):
            raise ValueError(
                f"layer {layer!r} multiplies by several weights with one op: freeze "
                "takes layers that multiply by one parameter, in one way"
            )
    return {x: codes for x, (codes, _) in weights.items() if x not in making.left}


def _make_places(model: nnx.Module, making: "MakingCodes") -> None:
    """Gives ops variables for the codes that a trace of the model has announced."""
    kind = StepCodes if making.for_step else FrozenCodes
    for dot in dots_by_path(model).values():
        if dot.layer not in making.made:
            continue
        _, shapes = making.made[dot.layer]
        stack = dot.theta.shape
        codes = [
            jnp.zeros((*stack, *x.shape), x.dtype) for x in jax.tree.leaves(shapes)
        ]
        codes = jax.tree.unflatten(jax.tree.structure(shapes), codes)
        place: nnx.Variable[Any] = kind((codes, jnp.zeros(stack, jnp.int32)))
        setattr(dot, _MADE, nnx.data(place))


def _join(parts: Iterable[Any]) -> str:
    return "/".join(map(str, parts))
