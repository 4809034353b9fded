"""The projections of a layer, and the norms whose outputs they read.

Norm and projection run as one fused layer of ``fbq_jax`` if the recipe supports it and
the backward pass reads packed codes: the fused layer quantizes values where it computes
them. Otherwise norm and projection are separate Flax modules. Both variants use the
same names for parameters and state.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import fbq_jax
from examples.llama.model_config import LlamaConfig
from fbq_jax import nonlinear

DotGeneral = Callable[..., jax.Array]
INITIALIZER = nn.initializers.normal(stddev=0.02)


def norm_dense(
    config: LlamaConfig,
    dot_general: DotGeneral | None,
    features: int,
    *,
    use_bias: bool,
    name: str,
) -> nn.Module:
    """Returns a norm, ``"norm"``, and a projection, ``"dense"``, as one module.

    The module maps [..., K] to [..., features].
    """
    if not fuses(config, dot_general):
        return _NormDense(config, features, use_bias, dot_general, name=name)
    return fbq_jax.NormDense(
        features, use_bias=use_bias, **_fused_options(config, dot_general), name=name
    )


def gated_mlp(
    config: LlamaConfig, dot_general: DotGeneral | None, *, name: str
) -> nn.Module:
    """Returns a norm and SwiGLU as one module: ``"norm"``, ``"gate_up"``, ``"down"``.

    The module maps [..., hidden_size] to the same shape.
    """
    if not fuses(config, dot_general):
        return _GatedMLP(config, dot_general, name=name)
    return fbq_jax.GatedMLP(
        config.intermediate_size, **_fused_options(config, dot_general), name=name
    )


def fuses(config: LlamaConfig, dot_general: DotGeneral | None) -> bool:
    """Whether norms and projections run as fused layers of ``fbq_jax``."""
    return (
        config.saved_bits is not None
        and isinstance(dot_general, fbq_jax.FallbackDot)
        and fbq_jax.fuses(dot_general.recipe)
    )


def dense(
    config: LlamaConfig, dot_general: DotGeneral | None = None
) -> Callable[..., nn.Dense]:
    """Returns a constructor of projections that takes ``features`` and ``name``."""
    return functools.partial(
        nn.Dense,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=INITIALIZER,
        dot_general=dot_general,
    )


def norm(config: LlamaConfig, name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns an RMSNorm that computes in float32 and returns ``config.dtype``."""
    module: nn.Module
    if config.saved_bits is None:
        module = nn.RMSNorm(epsilon=config.norm_eps, name=name)
    else:
        module = fbq_jax.RMSNorm(
            epsilon=config.norm_eps, bits=config.saved_bits, name=name
        )
    return lambda x: module(x.astype(jnp.float32)).astype(config.dtype)


def _fused_options(
    config: LlamaConfig, dot_general: DotGeneral | None
) -> dict[str, Any]:
    return {
        "epsilon": config.norm_eps,
        "bits": config.saved_bits,
        "dtype": config.dtype,
        "kernel_init": INITIALIZER,
        "dot_general": dot_general,
    }


class _NormDense(nn.Module):
    config: LlamaConfig
    features: int
    use_bias: bool
    dot_general: DotGeneral | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        project = dense(self.config, self.dot_general)
        x = norm(self.config, "norm")(x)
        return project(self.features, use_bias=self.use_bias, name="dense")(x)


class _GateUp(nn.Module):
    """Gate and up as one product with a kernel [K, 2, F]."""

    config: LlamaConfig
    dot_general: DotGeneral | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, size = self.config, x.shape[-1]
        shape = size, 2, config.intermediate_size
        kernel = self.param("kernel", INITIALIZER, shape, jnp.float32)
        # XLA would transpose the product of a kernel with three axes.
        kernel = kernel.astype(config.dtype).reshape(size, -1)
        multiply = self.dot_general or jax.lax.dot_general
        return multiply(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class _GatedMLP(nn.Module):
    config: LlamaConfig
    dot_general: DotGeneral | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        project = dense(config, self.dot_general)
        x = norm(config, "norm")(x)
        gate_up = _GateUp(config, self.dot_general, name="gate_up")(x)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        if config.saved_bits is None:
            x = nn.silu(gate) * up
        else:
            x = nonlinear.silu_gate(gate, up, bits=config.saved_bits)
        return project(config.hidden_size, name="down")(x)
