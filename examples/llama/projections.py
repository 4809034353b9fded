"""The projections of a layer, and the norms whose outputs they read.

Norm and projection run as one fused layer of ``fbq_jax`` if the recipe supports it, the
backward pass reads packed codes, and the model has the gate and the norms of Llama.
Otherwise they are separate Flax modules, with the same names for parameters and state.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

import fbq_jax
from examples.llama import invariant
from examples.llama.model_config import LlamaConfig
from fbq_jax import nonlinear

DotGeneral = Callable[..., jax.Array]
INITIALIZER = nn.initializers.normal(stddev=0.02)


def fuses(config: LlamaConfig, dot_general: DotGeneral | None) -> bool:
    """Whether norms and projections run as fused layers of ``fbq_jax``."""
    is_supported = _could_fuse(config, dot_general) and not config.invariant
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
    recipe: Any = getattr(dot_general, "recipe", None)
    return config.saved_bits is not None and is_int8 and fbq_jax.fuses(recipe)


class Part(nn.Module):
    """A part of the model, which makes its layers."""

    config: LlamaConfig
    dot_general: DotGeneral | None = None

    @nn.nowrap
    def _fuses(self, *layers: str) -> bool:
        """Whether layers inside this part run fused."""
        op = self.dot_general
        ops = [op]
        if isinstance(op, fbq_jax.RulesDot):
            ops = [op.at("/".join((*self.path, layer))) for layer in layers]
        return all(fuses(self.config, op) for op in ops)

    @nn.nowrap
    def dense(self, features: int, name: str, **options: Any) -> nn.Dense:
        """Returns a projection."""
        options = {"use_bias": False, **self._options(), **options}
        return nn.Dense(features, name=name, **options)

    @nn.nowrap
    def norm(self, name: str) -> Callable[[jax.Array], jax.Array]:
        """Returns an RMSNorm that computes in float32 and returns ``config.dtype``."""
        epsilon, bits = self.config.norm_eps, self.config.saved_bits
        module: nn.Module
        if self.config.unit_offset_norms or self.config.invariant:
            return _Norm(self.config, name=name)
        if bits is None:
            module = nn.RMSNorm(epsilon=epsilon, name=name)
        else:
            module = fbq_jax.RMSNorm(epsilon=epsilon, bits=bits, name=name)
        return lambda x: module(x.astype(jnp.float32)).astype(self.config.dtype)

    @nn.nowrap
    def norm_dense(self, features: int, name: str) -> nn.Module:
        """Returns a norm, ``"norm"``, and a projection, ``"dense"``, as one module."""
        config = self.config
        if not self._fuses(f"{name}/dense"):
            return _NormDense(config, self.dot_general, features, name=name)
        options = {"use_bias": config.qkv_bias, **self._fused_options()}
        return fbq_jax.NormDense(features, **options, name=name)

    @nn.nowrap
    def gated_mlp(self, name: str) -> nn.Module:
        """Returns a norm and a gated MLP as one module: "norm", "gate_up" and "down".

        A mixture of experts has its projections, and its router, in "experts".
        """
        config = self.config
        if config.num_experts is not None:
            return _Mixture(config, self.dot_general, name=name)
        if not self._fuses(f"{name}/gate_up", f"{name}/down"):
            return _GatedMLP(config, self.dot_general, name=name)
        size, options = config.intermediate_size, self._fused_options()
        return fbq_jax.GatedMLP(size, **options, name=name)

    @nn.nowrap
    def _options(self) -> dict[str, Any]:
        options = {"dtype": self.config.dtype, "dot_general": self.dot_general}
        return {"kernel_init": INITIALIZER, **options}

    @nn.nowrap
    def _fused_options(self) -> dict[str, Any]:
        config = self.config
        options = {"epsilon": config.norm_eps, "bits": config.saved_bits}
        return options | self._options()


class _Norm(Part):
    """An RMSNorm that multiplies by ``1 + scale``, or that is invariant."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, bits = self.config, self.config.saved_bits
        offset = float(config.unit_offset_norms)
        scale = self.param("scale", nn.initializers.constant(1 - offset), x.shape[-1:])

        def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32)
            if bits is not None:
                y = nonlinear.rms_norm(x, scale, epsilon=config.norm_eps, bits=bits)
                return y.astype(config.dtype)
            mean = jnp.mean(x * x, axis=-1, keepdims=True)
            row = jnp.expand_dims(scale, range(x.ndim - 1))
            return (x * (lax.rsqrt(mean + config.norm_eps) * row)).astype(config.dtype)

        if config.invariant:
            norm = functools.partial(invariant.rms_norm, config.norm_eps, norm)
        return norm(x, offset + scale)


class _NormDense(Part):
    features: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = self.dense(self.features, "dense", use_bias=self.config.qkv_bias)
        return dense(self.norm("norm")(x))


class _GateUp(Part):
    """Gate and up as one product with a kernel [K, 2, F]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, size = self.config, x.shape[-1]
        shape = size, 2, config.intermediate_size
        kernel = self.param("kernel", INITIALIZER, shape, jnp.float32)
        # XLA would transpose the product of a kernel with three axes.
        kernel = jnp.asarray(kernel, config.dtype).reshape(size, -1)
        multiply = self.dot_general or lax.dot_general
        return multiply(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class _GatedMLP(Part):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, bits = self.config, self.config.saved_bits
        x = self.norm("norm")(x)
        x = _GateUp(config, self.dot_general, name="gate_up")(x)
        silu = config.activation == "silu"

        def in_floats(gate: jax.Array, up: jax.Array) -> jax.Array:
            return (nn.silu if silu else nn.gelu)(gate) * up

        gate_of = in_floats
        if bits is not None:
            gate_of = nonlinear.silu_gate if silu else nonlinear.gelu_gate
            gate_of = functools.partial(gate_of, bits=bits)
        if config.invariant:
            x = invariant.pointwise(in_floats, x, gate_of, 2)
        else:
            x = gate_of(*jnp.split(x, 2, axis=-1))
        return self.dense(config.hidden_size, "down")(x)


class _Mixture(Part):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, routing = self.config, self.config.routing()
        assert routing is not None
        experts = fbq_jax.MoEMLP(
            *(routing, config.intermediate_size),
            bits=config.saved_bits,
            router_init=INITIALIZER,
            kernel_init=INITIALIZER,
            dot_general=self.dot_general,
            name="experts",
        )
        return experts(self.norm("norm")(x))
