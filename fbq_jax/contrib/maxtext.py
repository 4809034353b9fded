"""MaxText: quantized dense layers in the models that its trainer makes.

docs/integrations/maxtext.md shows a launch script and says which of MaxText's settings
work.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fbq_jax.contrib import needs
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.nnx.dot import FallbackDot
from fbq_jax.nnx.naming import name_layers
from fbq_jax.nnx.rules import unchanged_on_error
from fbq_jax.nnx.tracing import matrices_of, trace_products
from fbq_jax.recipes import fallback, path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import RulesReport, rules_report
from fbq_jax.recipes.schema import Recipe


@contextlib.contextmanager
def quantize_models(
    rules: Mapping[str, Recipe | None],
    implementation: str | None = None,
    *,
    ignore_precision: bool = False,
) -> Iterator[None]:
    """Quantizes every model that MaxText makes in this context, and prints what it did.

    It warns if MaxText made none.

    Args:
      rules: the rules of ``quantize``.
      implementation: as in ``quantize``.
      ignore_precision: as in ``quantize``.

    Raises:
      ImportError: MaxText is not installed.
      RuntimeError: this version of MaxText has other functions.
      TypeError: a rule's recipe is neither a ``Recipe`` nor None.
      ValueError: a pattern is not a regular expression, or no implementation has this
        name; when MaxText makes a model, its ``quantization`` is not empty, or
        ``quantize`` raises it.
    """
    pairs = path_rules.as_pairs(rules)
    DotConfig(fallback, implementation)  # checks the implementation
    make_op = functools.partial(
        FallbackDot, implementation=implementation, ignore_precision=ignore_precision
    )
    quantizations, original = _find("maxtext.layers.quantizations", _MAKE)
    called = reported = False

    def quantize_model(model: Any, config: Any) -> Any:
        nonlocal called, reported
        called = True
        if config.quantization:
            raise ValueError(
                "fbq_jax.maxtext quantizes the model, and so does MaxText with "
                f"quantization={config.quantization!r}: leave that empty"
            )
        rngs = nnx.Rngs(config.init_weights_seed)
        found = _quantize_layers(model, pairs, make_op, rngs)
        # MaxText makes each model several times.
        if not reported and jax.process_index() == 0:
            print(_report(model, pairs, found))
            reported = True
        return model

    setattr(quantizations, _MAKE, quantize_model)
    try:
        yield
    finally:
        setattr(quantizations, _MAKE, original)
    if not called:
        warnings.warn(
            "fbq_jax.maxtext quantized nothing: MaxText made no model in "
            "quantize_models, or made it with use_m3_model",
            stacklevel=3,
        )


def quantize(
    model: Any,
    rules: Mapping[str, Recipe | None],
    *,
    rngs: nnx.Rngs,
    implementation: str | None = None,
    ignore_precision: bool = False,
) -> RulesReport:
    """Gives each dense layer of a new MaxText model the recipe of its rule.

    Dense layers are MaxText's ``DenseGeneral``: the projections of attention, the MLPs
    and the head ``"decoder/logits_dense"``.  Each has an ``fbq_jax.nnx.FallbackDot``,
    and each layer of a scanned stack a state of its own.  Routers, experts, and heads
    that share the embedding's weight, stay in float.

    Args:
      model: a ``maxtext.models.models.Transformer``; changed in place.  An error leaves
        it unchanged.
      rules: a mapping from patterns of paths, such as ``"decoder/layers/mlp/wo"``, to
        recipes, tried in order (``fbq_jax.recipes.path_rules``).  Without
        ``scan_layers`` the paths count layers: ``"decoder/layers_0/mlp/wo"``.
      rngs: seeds the noise of the layers, as in ``fbq_jax.nnx.FallbackDot``.
      implementation: as in ``fbq_jax.nnx.FallbackDot``.
      ignore_precision: whether to quantize products although MaxText's
        ``matmul_precision`` asks for a precision.

    Returns:
      The rule of each layer, the rules that apply to no layer, the layers without a
      rule, and what became of each parameter, by a trace of the model.

    Raises:
      ImportError: MaxText is not installed.
      RuntimeError: this version of MaxText has other functions.
      TypeError: a rule's recipe is neither a ``Recipe`` nor None.
      ValueError: a pattern is not a regular expression, no implementation has this
        name, the model is pipelined, the head is quantized but its loss is tiled over
        the vocabulary, the weights of a matched layer are in 8 bits, or
        ``matmul_precision`` asks for a precision.
    """
    pairs = path_rules.as_pairs(rules)
    with unchanged_on_error(model):
        make_op = functools.partial(
            FallbackDot,
            implementation=implementation,
            ignore_precision=ignore_precision,
        )
        found = _quantize_layers(model, pairs, make_op, rngs)
        return _report(model, pairs, found)


class _Quantized(NamedTuple):
    """A quantized layer's ``quant``, which tells MaxText not to slice its kernel."""

    quant_mode: str = "train"


def _quantize_layers(
    model: Any, rules: Pairs, make_op: Callable[..., FallbackDot], rngs: nnx.Rngs
) -> dict[str, str | None]:
    """Gives dense layers their ops; maps their paths to the patterns of their rules."""
    path_rules.refuse_activations_rules(
        rules, "MaxText's attention stays in floating point"
    )
    dense_general = _replace_product().DenseGeneral
    _check_config(model.config, rules)
    found: dict[str, str | None] = {}
    ops = []
    for parts, layer in nnx.iter_modules(model):
        if not isinstance(layer, dense_general):
            continue
        path = "/".join(map(str, parts))
        found[path], recipe = path_rules.first_match(rules, path)
        if recipe is None:
            continue
        if getattr(layer, "kernel_scale", None) is not None:
            raise ValueError(
                f"layer {path!r} has weights in 8 bits: fbq_jax.maxtext quantizes "
                "weights in floating point, such as weight_dtype=float32"
            )
        op = make_op(recipe, rngs=rngs)
        op.stack(_stack_shape(layer), rngs)
        ops.append((layer, op))
    for layer, op in ops:
        layer.dot_general = op
        layer._quant_dot_general_name = "dot_general"
        layer.quant = _Quantized()
    name_layers(model)
    return found


def _check_config(config: Any, rules: Pairs) -> None:
    """Raises ValueError if MaxText would lose the state of layers."""
    if config.using_pipeline_parallelism:
        raise ValueError(
            "fbq_jax.maxtext does not support MaxText's pipelines, which drop the "
            "state of layers and run them on empty microbatches: got "
            f"ici_pipeline_parallelism={config.ici_pipeline_parallelism} and "
            f"dcn_pipeline_parallelism={config.dcn_pipeline_parallelism}. Both must "
            "be 1; data, fsdp, tensor and context parallelism work"
        )
    if config.num_vocab_tiling > 1 and path_rules.first_match(rules, _HEAD).recipe:
        raise ValueError(
            f"with num_vocab_tiling={config.num_vocab_tiling} MaxText drops the state "
            f"of the head: begin the rules with {_HEAD!r}: None, or set it to 1"
        )


def _report(model: Any, rules: Pairs, found: dict[str, str | None]) -> RulesReport:
    """Traces a model to report what rules did to it."""
    config = model.config
    shape = config.micro_batch_size_to_train_on, config.max_target_length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    targets = {}
    if config.mtp_num_layers:  # multi-token prediction reads targets
        targets = dict.fromkeys(
            ("decoder_target_tokens", "decoder_target_mask"), tokens
        )
    # In explicit mode, layers name mesh axes.
    with jax.sharding.use_abstract_mesh(model.mesh.abstract_mesh):
        products = trace_products(
            model, (tokens,) * 3, {"enable_dropout": False, **targets}
        )
    return rules_report(rules, found, matrices_of(model), products)


def _stack_shape(layer: Any) -> tuple[int, ...]:
    """The numbers of layers in the stacks that a layer is in, the outermost first."""
    kernel = layer.kernel
    sizes = len(layer.in_features_shape) + len(layer.out_features_shape)
    if kernel.ndim == sizes:
        return ()
    # Each stack moved its axis from the front to this one.
    axis = kernel.get_metadata()["param_scan_axis"]
    return kernel.shape[axis : axis + kernel.ndim - sizes]


# The path of the head that does not share the embedding's weight.
_HEAD = "decoder/logits_dense"
# The functions of MaxText that this module replaces.
_MAKE = "maybe_quantize_model"
_PRODUCT = "_compute_dot_general_nnx"


@functools.cache
def _replace_product() -> Any:
    """Makes MaxText's product call our ops as ``lax.dot_general``.

    MaxText calls the ops of its own quantizations without an output sharding.

    Returns:
      The module ``maxtext.layers.linears``, changed when a model is first quantized.
    """
    linears, original = _find("maxtext.layers.linears", _PRODUCT)

    @functools.wraps(original)
    def product(
        inputs: jax.Array,
        kernel: jax.Array,
        axis: tuple[int, ...],
        contract_ind: tuple[int, ...],
        matmul_precision: str,
        op: Any,
        initializing: bool,
        out_sharding: Any = None,
        **kwargs: Any,
    ) -> jax.Array:
        if not isinstance(op, FallbackDot):
            first = inputs, kernel, axis, contract_ind, matmul_precision
            return original(*first, op, initializing, out_sharding, **kwargs)
        if out_sharding is not None:
            ndim = inputs.ndim + kernel.ndim - 2 * len(axis)
            out_sharding = linears.truncate_out_sharding(out_sharding, ndim)
        dimension_numbers = (axis, contract_ind), ((), ())
        precision = lax.Precision(matmul_precision)
        return op(
            inputs, kernel, dimension_numbers, precision, out_sharding=out_sharding
        )

    setattr(linears, _PRODUCT, product)
    return linears


def _find(module: str, function: str) -> tuple[Any, Callable[..., Any]]:
    """A module of MaxText, and a function of it.

    Raises:
      ImportError: MaxText is not installed.
      RuntimeError: the module has no such function.
    """
    with needs("maxtext", extra="maxtext"):
        found = importlib.import_module(module)
    if not hasattr(found, function):
        version = importlib.metadata.version("maxtext")
        raise RuntimeError(
            f"fbq_jax.maxtext does not know maxtext {version}, which has no "
            f"{module}.{function}; it knows 0.2.4 and 0.2.5"
        )
    return found, getattr(found, function)
