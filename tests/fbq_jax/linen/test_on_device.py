"""A training step runs on the device: the host decides nothing in it."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from fbq_jax import FallbackDot, GatedMLP, NormDense, fallback_dot, fp8_dot, recipes
from fbq_jax.bench import measure


def dense(dot_general):
    return nn.Dense(128, dtype=jnp.bfloat16, dot_general=dot_general)


MODULES = {
    "dense": dense(fallback_dot),
    "rowwise backward": dense(FallbackDot(recipes.fallback_rowwise_bwd)),
    "block": dense(FallbackDot(recipes.block)),
    "norm and dense": NormDense(128),
    "gated MLP": GatedMLP(128),
    "fp8": dense(fp8_dot),
}


def compiled_step(module, x):
    """The compiled gradient and state update of a module, and its arguments."""
    variables = module.init(jax.random.key(0), x)

    def step(variables, x):
        rest = {name: value for name, value in variables.items() if name != "params"}

        def loss(params):
            out = module.apply({"params": params, **rest}, x, mutable=list(rest))
            return jnp.sum(jnp.square(out[0].astype(jnp.float32))), out[1]

        return jax.grad(loss, has_aux=True)(variables["params"])

    return jax.jit(step).lower(variables, x).compile(), variables


@pytest.mark.parametrize("name", MODULES)
def test_a_step_has_no_conditional(name):
    x = jnp.ones((256, 256), jnp.bfloat16)
    step, _ = compiled_step(MODULES[name], x)
    assert " conditional(" not in step.as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dense", "block"])
def test_a_layer_takes_few_launches(name):
    """Three GEMMs, three quantizations, step lists and the state; and XLA's own."""
    x = jnp.ones((2048, 1024), jnp.bfloat16)
    module = MODULES[name].clone(features=1024, use_bias=False)
    step, variables = compiled_step(module, x)
    text = step.as_text()
    assert " conditional(" not in text
    assert " while(" not in text
    kernels = [kernel for kernel, _ in measure.kernels(step, variables, x)]
    assert len(kernels) <= {"dense": 13, "block": 12}[name], kernels
