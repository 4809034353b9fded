"""Flax Linen modules of layers that are fused with those before them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Variable

from fbq_jax.core import fused_layers, matmul_vjp, threshold
from fbq_jax.core.dimension_numbers import output_of
from fbq_jax.core.dot_general import row_axes
from fbq_jax.core.nonlinear import NormSpec
from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.reference import Quantized
from fbq_jax.linen.dot import FallbackDot, fallback_dot
from fbq_jax.linen.frozen import is_frozen, layer_weight
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.explicit_axes import automatic

Initializer = Callable[..., jax.Array]
_MATRICES = (((1,), (0,)), ((), ()))


class _Scale(nn.Module):
    """The parameter of ``nn.RMSNorm``, under its name."""

    param_dtype: Any

    @nn.compact
    def __call__(self, size: int) -> jax.Array:
        init = nn.initializers.ones
        return self.param("scale", init, (size,), self.param_dtype)


class _Kernel(nn.Module):
    """The parameters of ``nn.Dense`` and the state of its dot, under their names.

    The kernel comes as the fused ops take it: ``[1, K, N]``, or its codes if it is
    frozen.
    """

    param_dtype: Any
    kernel_init: Initializer
    dot_general: FallbackDot
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, dtype: Any, size: int, *features: int
    ) -> tuple[jax.Array | Quantized, jax.Array | None, Variable]:
        def init(key: jax.Array) -> jax.Array:
            shape = size, math.prod(features)
            kernel = self.kernel_init(key, shape, self.param_dtype)
            return kernel.reshape(size, *features)

        kernel, bias = self.param("kernel", init), None
        if self.use_bias:
            zeros = nn.initializers.zeros
            bias = self.param("bias", zeros, features, self.param_dtype)
        variable = self.dot_general.variable(self)
        kernel = jnp.asarray(kernel, dtype)
        # What a frozen layer multiplies by; one that trains makes it on its devices.
        matrix = _as_matrix(kernel) if is_frozen(variable.value) else kernel
        codes = layer_weight(self.dot_general.config, self, variable, matrix, _MATRICES)
        return kernel if codes is None else codes.main, bias, variable


class NormDense(nn.Module):
    """``RMSNorm`` and ``nn.Dense``, fused.

    Attributes:
      features: N, of the output.
      use_bias: whether a bias is added; not, unlike ``nn.Dense``, by default.
      epsilon: added to the mean square.
      bits: of each value that the norm saves for the backward pass, 4 to 12.
      dtype: of the computation and the output; None takes that of the input.
      param_dtype: of the parameters.
      kernel_init: the kernel's initializer.
      dot_general: its recipe, the collection of its state and its implementation.

    >>> layer = NormDense(8)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 16)))
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
        dtype, dot = self.dtype or x.dtype, self.dot_general
        _check(dot)
        gain = _Scale(self.param_dtype, name="norm")(x.shape[-1])
        kernel_of = _Kernel(
            self.param_dtype, self.kernel_init, dot, self.use_bias, name="dense"
        )
        weight, bias, variable = kernel_of(dtype, x.shape[-1], self.features)
        state, x = threshold.canonicalize_state(variable.value), x.astype(dtype)
        if isinstance(weight, Quantized):
            out = jax.ShapeDtypeStruct((*x.shape[:-1], self.features), dtype)
        else:
            contract_last = ((x.ndim - 1,), (0,)), ((), ())
            out = output_of(x, weight, contract_last, dtype, None)

        def layer(
            x: jax.Array,
            weight: jax.Array | Quantized,
            norm_scale: jax.Array,
            *scalars: jax.Array,
        ) -> tuple[jax.Array, fused_layers.Measured]:
            y, measured = fused_layers.norm_matmul(
                matmul_vjp.Spec(dot.recipe, dtype, dtype, dtype, dot.implementation),
                NormSpec(False, self.epsilon, self.bits),
                _as_rows(x, dot.recipe),
                norm_scale,
                _as_weights(weight),
                *scalars,
            )
            return y.reshape(out.shape), measured

        y, measured = automatic(layer, out)(
            x,
            weight,
            gain.astype(jnp.float32),
            state["theta"],
            threshold.call_seed(state),
        )
        new = threshold.update(state, measured.metric, measured.theta, dot.recipe)
        y = dot.commit(self, variable, new, y)
        if bias is None:
            return y
        return y + bias.astype(dtype).reshape((1,) * (y.ndim - 1) + (-1,))


class GatedMLP(nn.Module):
    """``RMSNorm``, SwiGLU and its two ``nn.Dense`` without bias, fused.

    The residual connection is the caller's.  The kernel of ``gate_up`` is
    ``[K, 2, F]``, the gate's and up's, so that both can be sharded along F.

    Attributes:
      hidden: F, the width of the gate and of up.
      epsilon: added to the mean square.
      bits: of each value that the norm and the gate save, 4 to 12.
      dtype: of the computation and the output; None takes that of the input.
      param_dtype: of the parameters.
      kernel_init: the kernels' initializer.
      dot_general: its recipe, the collection of its state and its implementation.

    >>> layer = GatedMLP(24)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 16)))
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
        dtype, dot, size = self.dtype or x.dtype, self.dot_general, x.shape[-1]
        _check(dot)
        gain = _Scale(self.param_dtype, name="norm")(size)
        weights, slots, states = [], [], []
        shapes = {"gate_up": (size, 2, self.hidden), "down": (self.hidden, size)}
        for name, shape in shapes.items():
            kernel_of = _Kernel(self.param_dtype, self.kernel_init, dot, name=name)
            weight, _, variable = kernel_of(dtype, *shape)
            weights.append(weight)
            slots.append(variable)
            states.append(threshold.canonicalize_state(variable.value))

        def layer(
            x: jax.Array,
            norm_scale: jax.Array,
            gate_up: jax.Array | Quantized,
            down: jax.Array | Quantized,
            *scalars: tuple[jax.Array, ...],
        ) -> tuple[jax.Array, tuple[fused_layers.Measured, fused_layers.Measured]]:
            spec = matmul_vjp.Spec(dot.recipe, dtype, dtype, dtype, dot.implementation)
            y, measured = fused_layers.gated_mlp(
                fused_layers.GatedSpecs(
                    spec, spec, NormSpec(False, self.epsilon, self.bits)
                ),
                _as_rows(x, dot.recipe),
                norm_scale,
                _as_weights(gate_up),
                _as_weights(down),
                *scalars,
            )
            return y.reshape(x.shape), measured

        x = x.astype(dtype)
        y, measured = automatic(layer, jax.eval_shape(lambda x: x, x))(
            x,
            gain.astype(jnp.float32),
            *weights,
            tuple(state["theta"] for state in states),
            tuple(threshold.call_seed(state) for state in states),
        )
        for variable, state, of in zip(slots, states, measured, strict=True):
            new = threshold.update(state, of.metric, of.theta, dot.recipe)
            y = dot.commit(self, variable, new, y)
        return y


def _as_matrix(kernel: jax.Array) -> jax.Array:
    """``[K, N]`` of a kernel, or ``[K, 2 F]`` of the gate's and up's ``[K, 2, F]``."""
    if kernel.ndim == 2:
        return kernel
    return fused_reference.join_gate_up(kernel[:, 0], kernel[:, 1])


def _as_weights(weight: jax.Array | Quantized) -> jax.Array | Quantized:
    """A stack of one matrix of a kernel; codes are one."""
    return weight if isinstance(weight, Quantized) else _as_matrix(weight)[None]


def _as_rows(x: jax.Array, recipe: Recipe) -> jax.Array:
    """Reshapes ``[..., K]`` to a stack of one matrix."""
    return x.reshape(1, *row_axes(x.shape[:-1], recipe), x.shape[-1])


def _check(dot: FallbackDot) -> None:
    if not isinstance(dot, FallbackDot):
        raise TypeError(f"a fused layer takes a FallbackDot; got {dot!r}")
    if not fused_layers.fuses(dot.recipe):
        raise ValueError(
            "a fused layer takes a recipe with block scales in all three GEMMs and "
            f"nearest rounding in fwd.lhs; got {dot.recipe}"
        )
