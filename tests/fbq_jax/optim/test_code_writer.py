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
    recipes,
    save_codes,
)
from tests.fbq_jax.optim.tools import BF16, Run, X
from tests.marks import with_first_fast


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


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(256, **BF16)(x)
        return nn.Dense(128, **BF16)(x)


class Stack(nn.Module):
    """Equal layers in a loop, whose backward pass computes them again."""

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0, "fallback": 0, "fallback_codes": 0},
            split_rngs={"params": True},
            length=3,
        )
        layer = nn.remat(NormDense, policy=save_codes, prevent_cse=False)
        return loop(layer(128, **BF16), x, None)[0]


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
    run = Run(Pair(), optim.with_codes(optax.adamw(1e-4)))
    optim.assert_live(run.params, run.codes)
    before = run.codes
    run.train(1)
    optim.assert_live(run.params, run.codes)
    with pytest.raises(RuntimeError, match="Dense_0/kernel, Dense_1/kernel"):
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
    "FP8 moments": optim.fp8_adamw(1e-3, rounding="stochastic"),
    "FP8 moments, float16 copy": optim.fp8_adamw(1e-3, master_dtype=jnp.float16),
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


@pytest.mark.parametrize("name", with_first_fast(OPTIMIZERS))
def test_transformations_of_optax(name):
    optimizer = OPTIMIZERS[name]
    want = Run(Pair(), optimizer, codes=False)
    run = Run(Pair(), optim.with_codes(optimizer))
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
