"""Flax Linen modules of linear layers fused with the layers that feed them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.core import fused_layers, nonlinear, threshold
from fbq_jax.core.arguments import DotArguments, row_shape
from fbq_jax.core.dot_general import LayerDot
from fbq_jax.core.fused_layers import FusedSpec
from fbq_jax.core.gemms import Spec
from fbq_jax.core.nonlinear import NormSpec
from fbq_jax.kernels import layer_sources
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.linen.dot import FallbackDot, fallback_dot
from fbq_jax.linen.rules import RulesDot
from fbq_jax.recipes.presets import describe_recipe
from fbq_jax.recipes.schema import check_no_recipe
from fbq_jax.sharding.mesh_axes import as_varying, run_over_auto_axes

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
      TypeError: ``dot_general`` is neither a ``FallbackDot`` nor a ``RulesDot``, or the
        dtype of the computation is not bfloat16, float16 or float32.
      ValueError: the recipe cannot be fused (``fbq_jax.fuses``), rules have none, or
        ``bits`` is out of range.

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
    dot_general: FallbackDot | RulesDot = fallback_dot

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., K]`` to ``[..., N]``."""
        x = x.astype(self.dtype or x.dtype)
        nonlinear.check_operands(self.bits, x=x)
        norm_scale = _Scale(self.param_dtype, name="norm")(x.shape[-1])
        op, dot, bias = _Projection(
            self.param_dtype,
            self.kernel_init,
            self.dot_general,
            self.use_bias,
            name="dense",
        )(x, x.shape[-1], self.features)
        contract_last = ((x.ndim - 1,), (0,)), ((), ())
        out = DotArguments(contract_last).output(x, dot.weight)
        y = _run(self, x, norm_scale, [(op, dot)], out)
        if bias is None:
            return y
        return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


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
      dot_general: sets the recipe, the collection of the state and the implementation;
        rules may set another recipe for ``down`` than for ``gate_up``.

    Raises:
      TypeError: ``dot_general`` is neither a ``FallbackDot`` nor a ``RulesDot``, or the
        dtype of the computation is not bfloat16, float16 or float32.
      ValueError: a recipe cannot be fused (``fbq_jax.fuses``), rules have none, or
        ``bits`` is out of range.

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
    dot_general: FallbackDot | RulesDot = fallback_dot

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., K]`` to the same shape."""
        x = x.astype(self.dtype or x.dtype)
        nonlinear.check_operands(self.bits, x=x)
        size = x.shape[-1]
        norm_scale = _Scale(self.param_dtype, name="norm")(size)
        shapes = {"gate_up": (size, 2, self.hidden), "down": (self.hidden, size)}
        projections = [
            _Projection(
                self.param_dtype, self.kernel_init, self.dot_general, name=name
            )(x, *shape)[:2]
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


class _Projection(nn.Module):
    """The parameters of ``nn.Dense`` and the state of its dot, under their names."""

    param_dtype: Any
    kernel_init: Initializer
    dot_general: FallbackDot | RulesDot
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, size: int, *features: int
    ) -> tuple[FallbackDot, LayerDot, jax.Array | None]:
        op = self._op(size, *features)

        def init(key: jax.Array) -> jax.Array:
            shape = size, math.prod(features)
            kernel = self.kernel_init(key, shape, self.param_dtype)
            return kernel.reshape(size, *features)

        kernel, bias = jnp.asarray(self.param("kernel", init), x.dtype), None
        if self.use_bias:
            zeros = nn.initializers.zeros
            bias = self.param("bias", zeros, features, self.param_dtype)
        # In training each device joins its shards of gate and up, inside ``_run``.
        dot = op.layer_dot(x, kernel, _MATRICES, as_matrix=_as_matrix)
        assert dot is not None
        return op, dot, bias

    def _op(self, *shape: int) -> FallbackDot:
        """The op of this layer; raises the errors that the fused modules document."""
        op = self.dot_general
        check_no_recipe(op)
        if isinstance(op, RulesDot):
            if (found := op.of_layer(shape)) is None:
                path = "/".join(self.path)
                raise ValueError(
                    f"a fused layer takes a recipe; rules have none: {path}"
                )
            op = found
        if not isinstance(op, FallbackDot):
            raise TypeError(f"a fused layer takes a FallbackDot; got {op!r}")
        if not fused_layers.fuses(op.recipe):
            raise ValueError(
                "a fused layer takes a recipe with INT8 block scales in all three "
                "GEMMs, or scales='row_block' for the lhs of each, nearest rounding in "
                f"fwd.lhs and where_slower='quantize'; got {describe_recipe(op.recipe)}"
            )
        return op


def _run(
    module: NormDense | GatedMLP,
    x: jax.Array,
    norm_scale: jax.Array,
    projections: Sequence[tuple[FallbackDot, LayerDot]],
    out: jax.core.ShapedArray,
) -> jax.Array:
    """Computes a fused module and updates the state of each of its linear layers."""
    ops, layers = zip(*projections, strict=True)
    dtype = x.dtype
    spec = FusedSpec(
        tuple(Spec(op.recipe, dtype, dtype, dtype, op.implementation) for op in ops),
        NormSpec(False, module.epsilon, module.bits),
    )
    # Rows in two axes are for recipes with scales per block.
    shapes = [row_shape(x.shape[:-1], op.recipe) for op in ops]
    shape = min(shapes, key=len)

    def compute(
        x: jax.Array,
        norm_scale: jax.Array,
        kernels: Sequence[jax.Array | None],
        codes: tuple[Layouts | None, ...],
        scalars: tuple[threshold.Scalars, ...],
    ) -> tuple[jax.Array, Sequence[threshold.Stats]]:
        rows = x.reshape(1, *shape, x.shape[-1])
        weights = tuple(w if w is None else _as_matrix(w)[None] for w in kernels)
        operands = as_varying((rows, norm_scale, weights, codes))
        own = tuple(one.on_device(operands[0]) for one in scalars)
        y, stats = fused_layers.norm_mlp(spec, *operands, own)
        return y.reshape(out.shape), stats

    states = [threshold.canonicalize_state(layer.state) for layer in layers]
    y, stats = run_over_auto_axes(
        compute,
        out,
        x,
        norm_scale.astype(jnp.float32),
        [None if layer.is_frozen else layer.weight for layer in layers],
        tuple(layer.codes for layer in layers),
        tuple(map(threshold.scalars_of, states)),
    )
    for layer, state, layer_stats in zip(layers, states, stats, strict=True):
        y = layer.commit(y, threshold.next_state(state, layer_stats))
    return y


def _as_matrix(kernel: jax.Array) -> jax.Array:
    """A kernel ``[K, N]``, or ``[K, 2, F]`` of gate and up joined to ``[K, 2 F]``."""
    if kernel.ndim == 2:
        return kernel
    return layer_sources.join_gate_up(kernel[:, 0], kernel[:, 1])
