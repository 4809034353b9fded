"""Optimizers that write the codes of weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fbq_jax import (
    FallbackDot,
    GatedMLP,
    MoEMLP,
    NormDense,
    Routing,
    fallback_dot,
    optim,
    quantize_weights_once,
    recipes,
)
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("standard_promotion")
BF16 = {"dtype": jnp.bfloat16, "dot_general": fallback_dot}


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        yield


class Layers(nn.Module):
    """A layer, a gate and a projection of several axes."""

    dot: FallbackDot = fallback_dot

    @nn.compact
    def __call__(self, x):
        layer = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general=self.dot)
        x = layer(256)(x)
        x = GatedMLP(256, dtype=jnp.bfloat16, dot_general=self.dot)(x)
        heads = nn.DenseGeneral((2, 64), dtype=jnp.bfloat16, dot_general=self.dot)(x)
        return nn.DenseGeneral(
            128, axis=(-2, -1), dtype=jnp.bfloat16, dot_general=self.dot
        )(heads)


class Stack(nn.Module):
    """Equal layers in a loop."""

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0, "fallback": 0, "fallback_codes": 0},
            split_rngs={"params": True},
            length=3,
        )
        return loop(NormDense(128, **BF16), x, None)[0]


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        return MoEMLP(Routing(4, 2), 128, **BF16)(x)


MODELS = {
    "layers": Layers(),
    "row blocks": Layers(FallbackDot(recipes.row_block_lhs)),
    "rows": nn.Dense(128, dot_general=FallbackDot(recipes.rowwise)),
    "scanned": Stack(),
    "experts": Experts(),
}
X = jax.random.normal(jax.random.key(0), (256, 128)).astype(jnp.bfloat16)


class Run:
    """A model in training, with or without codes."""

    def __init__(self, model, optimizer, codes=True):
        variables = jax.jit(model.init)(jax.random.key(1), X)
        self.model, self.optimizer = model, optimizer
        self.params, self.state = variables.pop("params"), dict(variables)
        self.opt_state = jax.jit(optimizer.init)(self.params)
        self.codes = {}
        if codes:
            make = jax.jit(lambda v: quantize_weights_once(model, v, X))
            self.codes = make({"params": self.params, **self.state})
        self.step = jax.jit(self._step)

    def loss(self, params, state, x):
        variables = {"params": params, **state}
        y, state = self.model.apply(variables, x, mutable=["fallback"])
        return jnp.mean(jnp.square(y.astype(jnp.float32))), state

    def _step(self, params, opt_state, state, codes, x):
        grad = jax.value_and_grad(self.loss, has_aux=True)
        if not codes:
            (loss, state), grads = grad(params, state, x)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            return loss, (params, opt_state, state, codes)
        weights = self.optimizer.differentiable(params, codes)
        (loss, state), grads = grad(weights, {**state, **codes}, x)
        new = self.optimizer.update(grads, opt_state, params, codes)
        return loss, (*new[:2], state, new[2])

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
        variables = {"params": self.params, **self.state}
        want = quantize_weights_once(self.model, variables, X)
        jax.tree.map(np.testing.assert_array_equal, self.codes, want)


@pytest.mark.parametrize("name", with_first_fast(MODELS))
def test_losses_are_those_without_codes(name):
    """Bit for bit, with any optimizer of optax."""
    optimizer = optax.adamw(1e-3)
    want = Run(MODELS[name], optimizer, codes=False)
    run = Run(MODELS[name], optim.with_codes(optimizer))
    assert run.train(5) == want.train(5)
    jax.tree.map(np.testing.assert_array_equal, run.params, want.params)
    run.check_codes()


def test_codes_of_other_weights_are_errors():
    """Where values are known, in the call; elsewhere by a check."""
    run = Run(MODELS["layers"], optim.with_codes(optax.adamw(1e-4)))
    optim.assert_live(run.params, run.codes)
    before = run.codes
    run.train(1)
    optim.assert_live(run.params, run.codes)
    with pytest.raises(RuntimeError, match="Dense_0/kernel, GatedMLP_0/down/kernel"):
        optim.assert_live(run.params, before)
    with pytest.raises(ValueError, match="layer 'Dense_0' has codes of another weight"):
        run.model.apply({"params": run.params, **run.state, **before}, X)


class Boxed(nn.Module):
    """A layer whose kernel has names of mesh axes."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(128, kernel_init=init, **BF16)(x)


OPTIMIZERS = {
    "some decay": optax.adamw(
        1e-3,
        weight_decay=0.5,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    ),
    "several steps": optax.MultiSteps(optax.adamw(1e-3), 2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "frozen": optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        lambda params: jax.tree.map_with_path(
            lambda path, _: "freeze" if path[0].key == "Dense_0" else "train", params
        ),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_transformations_of_optax(name):
    optimizer = OPTIMIZERS[name]
    want = Run(MODELS["layers"], optimizer, codes=False)
    run = Run(MODELS["layers"], optim.with_codes(optimizer))
    assert run.train(3) == want.train(3)
    run.check_codes()


def test_boxed_parameters_stay_boxed():
    run = Run(Boxed(), optim.with_codes(optax.sgd(0.1)))
    run.train(2)
    assert isinstance(run.params["Dense_0"]["kernel"], nn.Partitioned)
    run.check_codes()


def test_codes_of_other_models_are_errors():
    run = Run(Boxed(), optim.with_codes(optax.sgd(0.1)))
    with pytest.raises(ValueError, match="codes of Dense_0/kernel, which the param"):
        optim.assert_live({}, run.codes)
    with pytest.raises(ValueError, match="no codes to write"):
        run.optimizer.update(run.params, run.opt_state, run.params, {})
