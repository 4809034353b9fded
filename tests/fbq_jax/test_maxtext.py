"""The layers, scans and steps of MaxText in small, as its source has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from fbq_jax import FallbackDot, Recipe, recipes
from fbq_jax.maxtext import Quantization

RECIPE = Recipe(block=32)
LAYERS, WIDTH = 2, 64
X = jax.random.normal(jax.random.key(0), (4, 64, WIDTH))


class DenseGeneral(nnx.Module):
    """Asks ``quant`` for an op, bridges it, and starts it with a row of zeros."""

    def __init__(self, shape, axis, quant, rngs):
        self.axis = axis
        init = nn.initializers.lecun_normal(in_axis=tuple(range(len(axis))))
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        op = quant.dot_general_cls(mesh_axes=("embed", None, "mlp"))()
        self.name = f"{type(op).__name__}_0"
        setattr(self, self.name, nnx.bridge.ToNNX(op, rngs=rngs))
        self(jnp.zeros((1, *shape[: len(axis)]), jnp.bfloat16), initializing=True)

    def __call__(self, x, initializing=False):
        axis = tuple(a % x.ndim for a in self.axis)
        dims = (axis, tuple(range(len(axis)))), ((), ())
        kernel, op = self.kernel[...].astype(jnp.bfloat16), getattr(self, self.name)
        if initializing:
            op.lazy_init(x, kernel, dims, precision=None)
        return op(x, kernel, dims, precision=None, mutable=["aqt"])


class Block(nnx.Module):
    """A residual connection and, as after attention, heads that are put together."""

    def __init__(self, rngs):
        quant = Quantization(RECIPE)
        self.out = DenseGeneral((2, 32, WIDTH), (-2, -1), quant, rngs)

    def __call__(self, x):
        return x + self.out(x.reshape(*x.shape[:2], 2, 32))


def stacked(rngs):
    """Layers whose variables have an axis in front, and how to make one of them."""
    layers = [nnx.split(Block(rngs), nnx.Param, ...) for _ in range(LAYERS)]
    stack = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    return (
        layers[0][0],
        stack(*(p for _, p, _ in layers)),
        stack(*(rest for _, _, rest in layers)),
    )


def loss_of(graph, params, rest, x):
    """The loss, and the variables that are no parameters after it."""

    @jax.checkpoint
    def layer(x, variables):
        block = nnx.merge(graph, *variables, copy=True)
        y = block(x)
        return y, nnx.split(block, nnx.Param, ...)[2]

    y, rest = jax.lax.scan(layer, x.astype(jnp.bfloat16), (params, rest))
    return jnp.mean(jnp.square(y.astype(jnp.float32))), rest


def state_of(rest):
    """The states of the layers' op."""
    return nnx.to_pure_dict(rest)["out"]["FallbackDotGeneral_0"]["dot_general"]


def test_a_step_in_nnx():
    """Scanned and recomputed layers, whose gradients two microbatches add up."""
    graph, params, rest = stacked(nnx.Rngs(params=0, dropout=1))
    started = state_of(rest)
    np.testing.assert_array_equal(started["theta"], -1.0)  # a row of zeros sets none

    @jax.jit
    def step(params, rest, x):
        def microbatch(carry, x):
            total, rest = carry
            value_and_grad = jax.value_and_grad(
                functools.partial(loss_of, graph), has_aux=True
            )
            (loss, rest), grads = value_and_grad(params, rest, x)
            return (jax.tree.map(jnp.add, total, grads), rest), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        (grads, rest), losses = jax.lax.scan(microbatch, (zeros, rest), x)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), rest, losses

    losses = []
    for _ in range(2):
        params, rest, loss = step(params, rest, X.reshape(2, 2, *X.shape[1:]))
        losses.append(float(loss.mean()))
    assert losses[1] < losses[0]
    state = state_of(rest)
    np.testing.assert_array_equal(state["count"], started["count"] + 4)
    assert np.all(state["theta"] > 0.0)
    assert len(set(np.asarray(state["seed"]).tolist())) == LAYERS


def test_a_step_in_linen():
    """``nn.scan`` over collections of these names; the gradient has the new state."""
    quant = Quantization(RECIPE, collection="_overwrite_with_gradient")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (WIDTH,) * 2)
            op = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
            return x + op(x, kernel, (((2,), (0,)), ((), ())), precision=None), None

    model = nn.scan(
        nn.remat(Layer),
        variable_axes={"params": 0, "aqt": 0, "_overwrite_with_gradient": 0},
        split_rngs={"params": True, "dropout": False},
        length=LAYERS,
    )()
    variables = jax.jit(model.init)(jax.random.key(0), X, None)

    @jax.jit
    def grads(variables):
        return jax.grad(lambda v: jnp.mean(jnp.square(model.apply(v, X, None)[0])))(
            variables
        )

    state = grads(variables)["_overwrite_with_gradient"]
    state = state["FallbackDotGeneral_0"]["dot_general"]
    np.testing.assert_array_equal(state["count"], np.ones(LAYERS))
    assert np.all(state["theta"] > 0.0)


def test_an_op_is_that_of_linen_layers():
    quant = Quantization(recipes.block)
    assert quant.quant_mode == "train"
    assert quant.dot_general_cls()().dot == FallbackDot(recipes.block, "aqt")


def test_what_maxtext_cannot_carry_is_refused():
    with pytest.raises(ValueError, match=r"'aqt' or '_overwrite.*'fallback'"):
        Quantization(collection="fallback")
    with pytest.raises(TypeError, match="takes a Recipe"):
        Quantization("fallback")
    with pytest.raises(ValueError, match="mixture of experts"):
        Quantization().einsum(mesh_axes=("exp",))  # sparse_matmul=false
    with pytest.raises(ValueError, match="mixture of experts"):
        _ = Quantization().quant_dg  # sparse_matmul=true
