"""Delayed scaling in NNX matches Linen; only training changes the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fbq_jax import fp8_dot
from fbq_jax.nnx import Fp8Dot, Fp8Scaling, check_unshared, name_layers
from tests.fbq_jax.fp8.test_dot_general import HISTORY, OWG, X, init, train_step
from tests.fbq_jax.fp8.test_dot_general import Mlp as LinenMlp


class Mlp(nnx.Module):
    def __init__(self):
        def dense(*sizes):
            dot = Fp8Dot(HISTORY)
            return nnx.Linear(*sizes, dot_general=dot, rngs=nnx.Rngs(0))

        self.up, self.down = dense(32, 48), dense(48, 16)

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


@nnx.jit
def nnx_step(model, x):
    """The output and the gradients of the parameters; updates state and parameters."""

    def loss(model):
        y = model(x)
        return jnp.mean((y - 1.0) ** 2), y

    wrt = nnx.DiffState(0, (nnx.Param, Fp8Scaling))
    grads, y = nnx.grad(loss, argnums=wrt, has_aux=True)(model)
    scalings, grads = nnx.split_state(grads, Fp8Scaling, nnx.Param)
    nnx.update(model, scalings)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads))
    return y, nnx.to_pure_dict(grads)


def state_of(model):
    return {
        name: {"dot_general": {k: v._asdict() for k, v in layer["dot_general"].items()}}
        for name, layer in nnx.to_pure_dict(nnx.state(model, Fp8Scaling)).items()
    }


def test_beside_linen_over_steps():
    """Outputs, gradients, histories and scales agree while inputs grow and shrink."""
    linen, model = init(LinenMlp()), Mlp()
    nnx.update(model, nnx.State(linen["params"]))
    for scale in (1.0, 4.0, 60.0, 0.2, 0.5):
        z, linen_grads, linen = train_step(linen, scale * X)
        y, grads = nnx_step(model, scale * X)
        np.testing.assert_array_equal(y, z)
        jax.tree.map(np.testing.assert_array_equal, grads, linen_grads)
        jax.tree.map(np.testing.assert_array_equal, state_of(model), linen[OWG])
    assert linen[OWG]["up"]["dot_general"]["lhs"]["scale"] < 1.0
    before = state_of(model)
    model.eval()
    nnx.jit(lambda model: model(60.0 * X))(model)
    jax.tree.map(np.testing.assert_array_equal, state_of(model), before)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="history takes a positive integer; got 0"):
        Fp8Dot(0)
    with pytest.raises(ValueError, match=r"use fbq_jax\.nnx\.Fp8Dot in NNX"):
        nnx.Linear(32, 2, dot_general=fp8_dot, rngs=nnx.Rngs(0))(X)
    model = Mlp()
    check_unshared(model)
    model.down.dot_general = model.up.dot_general
    with pytest.raises(ValueError, match=r"layers '.*' and '.*' share one Fp8Dot"):
        check_unshared(model)
    for name, function in ("check_unshared", check_unshared), ("name_", name_layers):
        with pytest.raises(TypeError, match=rf"fbq_jax\.nnx\.{name}.*got NoneType"):
            function(None)


def test_a_module_may_keep_the_op_of_a_layer_inside_it():
    model = Mlp()
    model.op = nnx.data(model.up.dot_general)
    check_unshared(model)
    model.other = nnx.data([Mlp()])
    model.other[0].op = nnx.data(model.op)
    with pytest.raises(ValueError, match="layers 'up' and 'other/0' share one Fp8Dot"):
        check_unshared(model)
