"""Flax Linen modules of layers that are fused with those before them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Variable

from fbq_jax import fused, gemms, threshold
from fbq_jax.linen import FallbackDot, fallback_dot
from fbq_jax.nonlinear import NormSpec

Initializer = Callable[..., jax.Array]


class _Scale(nn.Module):
    """The parameter of ``nn.RMSNorm``, under its name."""

    param_dtype: Any

    @nn.compact
    def __call__(self, size: int) -> jax.Array:
        init = nn.initializers.ones
        return self.param("scale", init, (size,), self.param_dtype)


class _Kernel(nn.Module):
    """The parameters of ``nn.Dense`` and the state of its dot, under their names."""

    param_dtype: Any
    kernel_init: Initializer
    dot_general: FallbackDot
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, size: int, features: int
    ) -> tuple[jax.Array, jax.Array | None, Variable]:
        shape, dtype = (size, features), self.param_dtype
        kernel = self.param("kernel", self.kernel_init, shape, dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (features,), dtype)
        return kernel, bias, self.dot_general.slot(self)


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
        kernel, bias, slot = kernel_of(x.shape[-1], self.features)
        state = threshold.clean(slot.value)
        y, measured = fused.norm_matmul(
            gemms.Spec(dot.recipe, dtype, dtype, dtype, dot.implementation),
            NormSpec(False, self.epsilon, self.bits),
            x.astype(dtype).reshape(1, -1, x.shape[-1]),
            gain.astype(jnp.float32),
            kernel.astype(dtype)[None],
            state["theta"],
            threshold.call_seed(state),
        )
        new = threshold.update(state, measured.metric, measured.theta, dot.recipe)
        y = dot.move(self, slot, new, y.reshape(*x.shape[:-1], self.features))
        return y if bias is None else y + bias.astype(dtype)


class GatedMLP(nn.Module):
    """``RMSNorm``, SwiGLU and its two ``nn.Dense`` without bias, fused.

    The residual connection is the caller's.

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
    ({'kernel': (24, 16)}, {'kernel': (16, 48)}, {'scale': (16,)})
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
        kernels, slots, states = [], [], []
        shapes = {"gate_up": (size, 2 * self.hidden), "down": (self.hidden, size)}
        for name, shape in shapes.items():
            kernel_of = _Kernel(self.param_dtype, self.kernel_init, dot, name=name)
            kernel, _, slot = kernel_of(*shape)
            kernels.append(kernel.astype(dtype)[None])
            slots.append(slot)
            states.append(threshold.clean(slot.value))
        spec = gemms.Spec(dot.recipe, dtype, dtype, dtype, dot.implementation)
        y, measured = fused.gated_mlp(
            fused.GatedSpecs(spec, spec, NormSpec(False, self.epsilon, self.bits)),
            x.astype(dtype).reshape(1, -1, size),
            gain.astype(jnp.float32),
            kernels[0],
            kernels[1],
            (states[0]["theta"], states[1]["theta"]),
            (threshold.call_seed(states[0]), threshold.call_seed(states[1])),
        )
        y = y.reshape(x.shape)
        for slot, state, of in zip(slots, states, measured, strict=True):
            new = threshold.update(state, of.metric, of.theta, dot.recipe)
            y = dot.move(self, slot, new, y)
        return y


def _check(dot: FallbackDot) -> None:
    if not isinstance(dot, FallbackDot):
        raise TypeError(f"a fused layer takes a FallbackDot; got {dot!r}")
    if not fused.fuses(dot.recipe):
        raise ValueError(
            "a fused layer takes a recipe with block scales in all three GEMMs and "
            f"nearest rounding in fwd.lhs; got {dot.recipe}"
        )
