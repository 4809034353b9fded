"""A training run that the tests of optimizers share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fbq_jax import fallback_dot, quantize_weights_once

BF16 = {"dtype": jnp.bfloat16, "dot_general": fallback_dot}
X = jax.random.normal(jax.random.key(0), (256, 128)).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=0)
def _init(model):
    return model.init(jax.random.key(1), X)


@functools.partial(jax.jit, static_argnums=0)
def _quantize(model, variables):
    return quantize_weights_once(model, variables, X)


def loss_of(model, params, state, x):
    variables = {"params": params, **state}
    y, state = model.apply(variables, x, mutable=["fallback"])
    return jnp.mean(jnp.square(y.astype(jnp.float32))), state


def take_step(model, optimizer, params, opt_state, state, codes, x):
    grad = jax.value_and_grad(functools.partial(loss_of, model), has_aux=True)
    if not codes:
        (loss, state), grads = grad(params, state, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return loss, (params, opt_state, state, codes)
    weights = optimizer.differentiable(params, codes)
    (loss, state), grads = grad(weights, {**state, **codes}, x)
    new = optimizer.update(grads, opt_state, params, codes)
    return loss, (*new[:2], state, new[2])


_step = jax.jit(take_step, static_argnums=(0, 1))


class Run:
    """A model in training, with or without codes."""

    def __init__(self, model, optimizer, codes=True):
        variables = _init(model)
        self.model, self.optimizer = model, optimizer
        self.params, self.state = variables.pop("params"), dict(variables)
        self.opt_state = jax.jit(optimizer.init)(self.params)
        self.quantize = functools.partial(_quantize, model)
        self.codes = self.quantize(self.variables) if codes else {}
        self.step = functools.partial(_step, model, optimizer)

    @property
    def variables(self):
        return {"params": self.params, **self.state}

    def train(self, steps):
        """The losses of some steps."""
        losses = []
        for _ in range(steps):
            loss, new = self.step(
                self.params, self.opt_state, self.state, self.codes, X
            )
            self.params, self.opt_state, self.state, self.codes = new
            losses.append(float(loss))
        return losses

    def check_codes(self):
        """The codes are those of the parameters."""
        want = self.quantize(self.variables)
        jax.tree.map(np.testing.assert_array_equal, self.codes, want)
