"""Flax Linen modules of linear layers fused with the layers that feed them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Variable

from fbq_jax.core import fused_layers, nonlinear, threshold
from fbq_jax.core.dimension_numbers import Operand, row_shape
from fbq_jax.core.dot_call import DotCall
from fbq_jax.core.fused_layers import FusedSpec
from fbq_jax.core.nonlinear import NormSpec
from fbq_jax.core.spec import Spec
from fbq_jax.core.weight_products import mark_weight
from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.reference import Quantized
from fbq_jax.linen.dot import FallbackDot, fallback_dot, named
from fbq_jax.linen.frozen import is_frozen, kernel_of, layer_weight
from fbq_jax.linen.state import state_of
from fbq_jax.recipes.rules_report import describe_recipe
from fbq_jax.recipes.schema import check_no_recipe
from fbq_jax.sharding.explicit_axes import automatic
from fbq_jax.sharding.manual_axes import as_varying

Initializer = Callable[..., jax.Array]
_MATRICES = (((1,), (0,)), ((), ()))


class NormDense(nn.Module):
    """``RMSNorm`` and ``nn.Dense``, fused.

    Attributes:
      features: N, the width of the output.
      use_bias: whether to add a bias; False by default, unlike in ``nn.Dense``.
      epsilon: added to the mean square.
      bits: bits per value that the norm saves for the backward pass, 4 to 12.
      dtype: dtype of the computation and the output; None takes the input's.
      param_dtype: dtype of the parameters.
      kernel_init: the kernel's initializer.
      dot_general: sets the recipe, the collection of the state and the implementation.

    Raises:
      TypeError: ``dot_general`` is not a ``FallbackDot``, or the dtype of the
        computation is not bfloat16, float16 or float32.
      ValueError: the recipe cannot be fused (``fbq_jax.fuses``), or ``bits`` is out of
        range.

    >>> layer = NormDense(8)
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 16)))
    >>> jax.tree.map(jnp.shape, variables["params"])
    {'dense': {'kernel': (16, 8)}, 'norm': {'scale': (16,)}}
    """

    features: int
    use_bias: bool = False
    epsilon: float = 1e-6
    bits: int = 10
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    dot_general: FallbackDot = fallback_dot

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., K]`` to ``[..., N]``."""
        x = x.astype(self.dtype or x.dtype)
        _check(self, x)
        norm_scale = _Scale(self.param_dtype, name="norm")(x.shape[-1])
        dense = _Projection(
            self.param_dtype,
            self.kernel_init,
            self.dot_general,
            self.use_bias,
            name="dense",
        )(x, x.shape[-1], self.features)
        out = _dense_output(x, dense.weight, self.features)
        y = _run(self, x, norm_scale, [dense], out)
        if dense.bias is None:
            return y
        return y + dense.bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


class GatedMLP(nn.Module):
    """``RMSNorm``, SwiGLU and its two ``nn.Dense`` without biases, fused.

    The caller adds the skip connection.  The kernel of ``gate_up`` is ``[K, 2, F]``, so
    that the gate's half and up's half can both be sharded along F.

    Attributes:
      hidden: F, the width of the gate and of up.
      epsilon: added to the mean square.
      bits: bits per value that norm and gate save for the backward pass, 4 to 12.
      dtype: dtype of the computation and the output; None takes the input's.
      param_dtype: dtype of the parameters.
      kernel_init: the kernels' initializer.
      dot_general: sets the recipe, the collection of the state and the implementation.

    Raises:
      TypeError: ``dot_general`` is not a ``FallbackDot``, or the dtype of the
        computation is not bfloat16, float16 or float32.
      ValueError: the recipe cannot be fused (``fbq_jax.fuses``), or ``bits`` is out of
        range.

    >>> layer = GatedMLP(24)
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 16)))
    >>> shapes = jax.tree.map(jnp.shape, variables["params"])
    >>> shapes["down"], shapes["gate_up"], shapes["norm"]
    ({'kernel': (24, 16)}, {'kernel': (16, 2, 24)}, {'scale': (16,)})
    """

    hidden: int
    epsilon: float = 1e-6
    bits: int = 10
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    dot_general: FallbackDot = fallback_dot

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., K]`` to the same shape."""
        x = x.astype(self.dtype or x.dtype)
        _check(self, x)
        size = x.shape[-1]
        norm_scale = _Scale(self.param_dtype, name="norm")(size)
        shapes = {"gate_up": (size, 2, self.hidden), "down": (self.hidden, size)}
        projections = [
            _Projection(
                self.param_dtype, self.kernel_init, self.dot_general, name=name
            )(x, *shape)
            for name, shape in shapes.items()
        ]
        return _run(self, x, norm_scale, projections, jax.typeof(x))


class _Scale(nn.Module):
    """The parameter of ``nn.RMSNorm``, under its name."""

    param_dtype: Any

    @nn.compact
    def __call__(self, size: int) -> jax.Array:
        init = nn.initializers.ones
        return self.param("scale", init, (size,), self.param_dtype)


class _Linear(NamedTuple):
    """One linear layer of a fused module.

    Attributes:
      weight: the kernel in the dtype of the computation, or the colwise INT8 values of
        a frozen layer.
      bias: float ``[N]`` or None.
      variable: holds the layer's state.
      state: the value of ``variable`` before the call.
    """

    weight: jax.Array | Quantized
    bias: jax.Array | None
    variable: Variable
    state: threshold.State


class _Projection(nn.Module):
    """The parameters of ``nn.Dense`` and the state of its dot, under their names."""

    param_dtype: Any
    kernel_init: Initializer
    dot_general: FallbackDot
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, size: int, *features: int) -> _Linear:
        def init(key: jax.Array) -> jax.Array:
            shape = size, math.prod(features)
            kernel = self.kernel_init(key, shape, self.param_dtype)
            return kernel.reshape(size, *features)

        kernel, bias = jnp.asarray(self.param("kernel", init), x.dtype), None
        if self.use_bias:
            zeros = nn.initializers.zeros
            bias = self.param("bias", zeros, features, self.param_dtype)
        variable = self.dot_general.variable(self, x)
        # In training each device joins its shards of gate and up, inside ``automatic``.
        matrix = _as_matrix(kernel) if is_frozen(variable.value) else kernel
        codes = layer_weight(
            self.dot_general.config, self, variable, matrix, _MATRICES, kernel_of(self)
        )
        with named(self):
            kernel = mark_weight(kernel, self.dot_general.recipe)
        kernel = self.dot_general.check_moves(self, variable, kernel)
        weight = kernel if codes is None else codes.main
        state = threshold.canonicalize_state(state_of(variable))
        return _Linear(weight, bias, variable, state)


def _dense_output(
    x: jax.Array, weight: jax.Array | Quantized, features: int
) -> jax.core.ShapedArray:
    """The shape, dtype and sharding of ``nn.Dense``'s output."""
    if isinstance(weight, Quantized):
        kernel: Operand = jax.ShapeDtypeStruct((x.shape[-1], features), x.dtype)
    else:
        kernel = weight
    contract_last = ((x.ndim - 1,), (0,)), ((), ())
    return DotCall(contract_last).output(x, kernel)


def _run(
    module: NormDense | GatedMLP,
    x: jax.Array,
    norm_scale: jax.Array,
    layers: Sequence[_Linear],
    out: jax.core.ShapedArray,
) -> jax.Array:
    """Computes a fused module and updates the state of each of its linear layers."""
    dot, dtype = module.dot_general, x.dtype
    spec = FusedSpec(
        Spec(dot.recipe, dtype, dtype, dtype, dot.implementation),
        NormSpec(False, module.epsilon, module.bits),
    )

    def call(
        x: jax.Array,
        norm_scale: jax.Array,
        weights: Sequence[jax.Array | Quantized],
        scalars: tuple[threshold.Scalars, ...],
    ) -> tuple[jax.Array, Sequence[threshold.Stats]]:
        rows = x.reshape(1, *row_shape(x.shape[:-1], dot.recipe), x.shape[-1])
        matrices = tuple(map(_as_matrices, weights))
        rows, norm_scale, matrices = as_varying((rows, norm_scale, matrices))
        own = tuple(one.on_device(rows) for one in scalars)
        y, stats = fused_layers.norm_mlp(spec, rows, norm_scale, matrices, own)
        return y.reshape(out.shape), stats

    states = [layer.state for layer in layers]
    y, stats = automatic(call, out)(
        x,
        norm_scale.astype(jnp.float32),
        [layer.weight for layer in layers],
        tuple(map(threshold.scalars_of, states)),
    )
    for layer, gemm_stats in zip(layers, stats, strict=True):
        new = threshold.next_state(layer.state, gemm_stats)
        y = dot.commit(module, layer.variable, new, y)
    return y


def _as_matrix(kernel: jax.Array) -> jax.Array:
    """A kernel ``[K, N]``, or ``[K, 2, F]`` of gate and up joined to ``[K, 2 F]``."""
    if kernel.ndim == 2:
        return kernel
    return fused_reference.join_gate_up(kernel[:, 0], kernel[:, 1])


def _as_matrices(weight: jax.Array | Quantized) -> jax.Array | Quantized:
    """A kernel as a stack of one matrix; INT8 values are one already."""
    return weight if isinstance(weight, Quantized) else _as_matrix(weight)[None]


def _check(module: NormDense | GatedMLP, x: jax.Array) -> None:
    """Raises the errors that the fused modules document."""
    dot = module.dot_general
    check_no_recipe(dot)
    if not isinstance(dot, FallbackDot):
        raise TypeError(f"a fused layer takes a FallbackDot; got {dot!r}")
    if not fused_layers.fuses(dot.recipe):
        raise ValueError(
            "a fused layer takes a recipe with INT8 block scales in all three GEMMs, "
            "or scales='row_block' for the lhs of each, nearest rounding in fwd.lhs "
            f"and where_slower='quantize'; got {describe_recipe(dot.recipe)}"
        )
    nonlinear.check_operands(module.bits, x=x)
