"""The projections of a layer, and the norms whose outputs they read.

Norm and projection run as one fused layer of ``fbq_jax`` if the recipe supports it, the
backward pass reads packed codes, and the model has the gate and the norms of Llama: the
fused layer quantizes values where it computes them. Otherwise norm and projection are
separate Flax modules. Both variants use the same names for parameters and state.
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


def fuses(config: LlamaConfig, dot_general: DotGeneral | None) -> bool:
    """Whether norms and projections run as fused layers of ``fbq_jax``."""
    is_supported = _could_fuse(config, dot_general)
    return is_supported and why_not_fused(config, dot_general) is None


def why_not_fused(config: LlamaConfig, dot_general: DotGeneral | None) -> str | None:
    """Says what in the model keeps its norms and projections from running fused.

    None if they run fused, or would not in any model: for the recipe or ``saved_bits``.
    """
    parts = [f"the gate {config.activation}"] * (config.activation != "silu")
    parts += ["norms that multiply by 1 + scale"] * config.unit_offset_norms
    if not parts or not _could_fuse(config, dot_general):
        return None
    return (
        "norms, gates and projections run as separate layers: fbq_jax fuses SwiGLU and "
        f"norms that multiply by their scale, this model has {' and '.join(parts)}"
    )


def _could_fuse(config: LlamaConfig, dot_general: DotGeneral | None) -> bool:
    is_int8 = isinstance(dot_general, fbq_jax.FallbackDot)
    recipe = getattr(dot_general, "recipe", None)
    return config.saved_bits is not None and is_int8 and fbq_jax.fuses(recipe)


def norm_dense(
    config: LlamaConfig, dot_general: DotGeneral | None, features: int, *, name: str
) -> nn.Module:
    """Returns a norm, ``"norm"``, and a projection, ``"dense"``, as one module."""
    if not fuses(config, dot_general):
        return _NormDense(config, dot_general, features, name=name)
    options = _fused_options(config, dot_general)
    return fbq_jax.NormDense(features, use_bias=config.qkv_bias, **options, name=name)


def gated_mlp(
    config: LlamaConfig, dot_general: DotGeneral | None, *, name: str
) -> nn.Module:
    """Returns a norm and a gated MLP as one module: "norm", "gate_up" and "down".

    A mixture of experts has its projections, and its router, in "experts".
    """
    if config.num_experts is not None:
        return _Mixture(config, dot_general, name=name)
    if not fuses(config, dot_general):
        return _GatedMLP(config, dot_general, name=name)
    options = _fused_options(config, dot_general)
    return fbq_jax.GatedMLP(config.intermediate_size, **options, name=name)


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
    epsilon, bits = config.norm_eps, config.saved_bits
    module: nn.Module
    if config.unit_offset_norms:
        module = _UnitOffsetNorm(epsilon, bits, name=name)
    elif bits is None:
        module = nn.RMSNorm(epsilon=epsilon, name=name)
    else:
        module = fbq_jax.RMSNorm(epsilon=epsilon, bits=bits, name=name)
    return lambda x: module(x.astype(jnp.float32)).astype(config.dtype)


class _UnitOffsetNorm(nn.Module):
    """An RMSNorm that multiplies by ``1 + scale``."""

    epsilon: float
    bits: int | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = 1 + self.param("scale", nn.initializers.zeros, x.shape[-1:])
        if self.bits is not None:
            return nonlinear.rms_norm(x, scale, epsilon=self.epsilon, bits=self.bits)
        normalized = nn.RMSNorm(epsilon=self.epsilon, use_scale=False)(x)
        return normalized * jnp.expand_dims(scale, range(x.ndim - 1))


class _Part(nn.Module):
    config: LlamaConfig
    dot_general: DotGeneral | None


class _NormDense(_Part):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        project = dense(config, self.dot_general)
        x = norm(config, "norm")(x)
        return project(self.features, use_bias=config.qkv_bias, name="dense")(x)


class _GateUp(_Part):
    """Gate and up as one product with a kernel [K, 2, F]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, size = self.config, x.shape[-1]
        shape = size, 2, config.intermediate_size
        kernel = self.param("kernel", INITIALIZER, shape, jnp.float32)
        # XLA would transpose the product of a kernel with three axes.
        kernel = jnp.asarray(kernel, config.dtype).reshape(size, -1)
        multiply = self.dot_general or jax.lax.dot_general
        return multiply(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class _GatedMLP(_Part):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        project = dense(config, self.dot_general)
        x = norm(config, "norm")(x)
        gate_up = _GateUp(config, self.dot_general, name="gate_up")(x)
        x = _gate(config, *jnp.split(gate_up, 2, axis=-1))
        return project(config.hidden_size, name="down")(x)


class _Mixture(_Part):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, routing = self.config, self.config.routing()
        assert routing is not None
        x = norm(config, "norm")(x)
        experts = fbq_jax.MoEMLP(
            *(routing, config.intermediate_size),
            bits=config.saved_bits,
            router_init=INITIALIZER,
            kernel_init=INITIALIZER,
            dot_general=self.dot_general,
            name="experts",
        )
        return experts(x)


def _gate(config: LlamaConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    silu = config.activation == "silu"
    if config.saved_bits is None:
        return (nn.silu if silu else nn.gelu)(gate) * up
    gate_of = nonlinear.silu_gate if silu else nonlinear.gelu_gate
    return gate_of(gate, up, bits=config.saved_bits)
