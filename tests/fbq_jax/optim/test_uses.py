"""Ways to train with codes: each works, or is one clear error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from fbq_jax import FallbackDot, freeze, optim, quantize_weights_once
from tests.fbq_jax.optim.tools import BF16, Run, X, loss_of, take_step
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices
from tests.marks import with_first_fast

ADAMW = optax.adamw(1e-2)
WRITER = optim.with_codes(ADAMW)
same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(128, **BF16)(nn.gelu(nn.Dense(128, **BF16)(x)))


class Twice(nn.Module):
    """A layer that is called twice."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(128, **BF16)
        return layer(nn.gelu(layer(x)))


class TiedHead(nn.Module):
    """A head that multiplies by the embedding, which lookups read in float."""

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(32, 128)
        x += embed(jnp.arange(x.shape[0]) % 32).astype(x.dtype)
        x = nn.Dense(128, **BF16)(x)
        head = nn.Dense(32, use_bias=False, **BF16)
        return head.apply({"params": {"kernel": embed.embedding.T}}, x)


class Adapted(nn.Module):
    """A layer with the adapter of LoRA, which is quantized, too."""

    @nn.compact
    def __call__(self, x):
        base = nn.Dense(128, dtype=x.dtype, dot_general=FallbackDot(collection="base"))
        y = nn.Dense(16, name="a", **BF16)(x)
        return base(x) + nn.Dense(128, name="b", **BF16)(y)


@pytest.mark.filterwarnings("ignore:these layers quantize their weights in every call")
@pytest.mark.parametrize("model", with_first_fast([Twice(), TiedHead()]))
def test_tied_weights(model):
    """All codes of a weight are written; a tied head quantizes in every call."""
    run = Run(model, WRITER)
    assert run.train(3) == Run(model, ADAMW, codes=False).train(3)
    run.check_codes()


def adapted(frozen):
    """A base with adapters, and the variables; the base may have codes only."""
    model = Adapted()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    apply = functools.partial(model.apply, mutable=["base", "fallback"])
    _, states = jax.jit(apply)(variables, X)
    variables = {**variables, **states}
    if frozen:
        codes = freeze(model, variables, X)
        kernel = {"Dense_0": codes["params"]["Dense_0"]}
        variables |= {"params": variables["params"] | kernel, "base": codes["base"]}
    return model, variables


def train_adapters(model, variables, writer, codes):
    """The losses of three steps, and the last codes."""
    variables = dict(variables)
    params = variables.pop("params")
    adapters = {name: params[name] for name in "ab"}
    state = writer.init(adapters)

    @jax.jit
    def step(adapters, state, codes):
        def loss(adapters):
            of_call = {"params": {**params, **adapters}, **variables, **codes}
            y, _ = model.apply(of_call, X, mutable=["fallback"])
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        weights = writer.differentiable(adapters, codes) if codes else adapters
        value, grads = jax.value_and_grad(loss)(weights)
        if codes:
            return value, *writer.update(grads, state, adapters, codes)
        updates, state = writer.update(grads, state, adapters)
        return value, optax.apply_updates(adapters, updates), state, codes

    losses = []
    for _ in range(3):
        value, adapters, state, codes = step(adapters, state, codes)
        losses.append(float(value))
    if codes:
        optim.assert_live({**params, **adapters}, codes)
    return losses, codes


@pytest.mark.parametrize("frozen", with_first_fast([False, True]))
def test_the_base_of_lora(frozen):
    """Its codes are made once; if it is frozen, it has no others."""
    model, variables = adapted(frozen)
    codes = jax.jit(lambda v: quantize_weights_once(model, v, X))(variables)
    losses, after = train_adapters(model, variables, WRITER, codes)
    assert losses == train_adapters(model, variables, ADAMW, {})[0]
    assert ("base_codes" in codes) != frozen
    if not frozen:
        same(after["base_codes"], codes["base_codes"])


@pytest.mark.exhaustive
def test_frozen_layers_of_the_same_collection_are_an_error():
    run = Run(Two(), WRITER)
    run.train(1)
    frozen = freeze(run.model, run.variables, X)
    head = {"Dense_1": run.params["Dense_1"]}
    state = frozen["fallback"] | {"Dense_1": run.state["fallback"]["Dense_1"]}
    variables = {"params": frozen["params"] | head, "fallback": state}
    codes = quantize_weights_once(run.model, variables, X)
    with pytest.raises(ValueError, match="'Dense_0' is frozen and does not train"):
        run.model.apply({**variables, **codes}, X, mutable=["fallback"])


@pytest.mark.exhaustive
def test_a_moving_average():
    """Without codes, or with its own; those of other weights are found."""
    run = Run(Two(), WRITER)
    first = run.params
    run.train(2)
    average = optax.incremental_update(run.params, first, 0.5)
    variables = {"params": average, **run.state}
    evaluate = jax.jit(run.model.apply)
    codes = optim.write_codes(run.codes, average)
    same(evaluate({**variables, **codes}, X), evaluate(variables, X))
    with pytest.raises(ValueError, match="layer 'Dense_1' has codes of another weight"):
        run.model.apply({**variables, **run.codes}, X)
    with pytest.raises(RuntimeError, match="Dense_0/kernel, Dense_1/kernel are of ot"):
        optim.assert_live(average, run.codes)


def test_a_checkpoint_has_no_codes():
    run = Run(Two(), WRITER)
    run.train(2)
    saved = serialization.to_bytes((run.params, run.opt_state, run.state))
    want, resumed = run.train(2), Run(Two(), WRITER)
    like = resumed.params, resumed.opt_state, resumed.state
    restored = serialization.from_bytes(like, saved)
    resumed.params, resumed.opt_state, resumed.state = restored
    with pytest.raises(RuntimeError, match="are of other weights: make new ones"):
        optim.assert_live(resumed.params, resumed.codes)
    resumed.codes = optim.write_codes(resumed.codes, resumed.params)
    assert resumed.train(2) == want


@pytest.mark.filterwarnings("error:Some donated buffers were not usable")
def test_donation():
    run, want = Run(Two(), WRITER), Run(Two(), WRITER)
    step = functools.partial(take_step, run.model, WRITER)
    run.step = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    before = run.params, run.codes["fallback_codes"]["Dense_0"]
    assert run.train(2) == want.train(2)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))


@pytest.mark.exhaustive
def test_a_loop_over_steps():
    run, want = Run(Two(), WRITER), Run(Two(), WRITER)

    @jax.jit
    def train(carry, batches):
        def step(carry, x):
            loss, carry = take_step(run.model, WRITER, *carry, x)
            return carry, loss

        return jax.lax.scan(step, carry, batches)

    carry = run.params, run.opt_state, run.state, run.codes
    carry, losses = train(carry, jnp.stack([X] * 3))
    assert losses.tolist() == want.train(3)
    run.params, _, run.state, run.codes = carry
    run.check_codes()


@needs_devices
@pytest.mark.parametrize("how", with_first_fast(["shard_map", "pmap"]))
def test_devices_that_run_one_program_each(how):
    run = Run(Two(), WRITER)

    def step(params, opt_state, state, codes, x):
        weights = WRITER.differentiable(params, codes)
        loss = functools.partial(loss_of, run.model)
        grad = jax.grad(loss, has_aux=True)
        grads, state = grad(weights, {**state, **codes}, x)
        grads = jax.lax.pmean(grads, "data")
        params, _, codes = WRITER.update(grads, opt_state, params, codes)
        return params, jax.tree.map(lambda x: x[None], state), codes

    inputs = run.params, run.opt_state, run.state, run.codes
    if how == "pmap":
        inputs = jax.tree.map(lambda x: jnp.stack([x] * 2), inputs)
        run_step = jax.pmap(step, "data", devices=jax.devices()[:2])
        params, _, codes = run_step(*inputs, X.reshape(2, -1, 128))
        params, codes = jax.tree.map(lambda x: x[0], (params, codes))
    else:
        specs = (*[P()] * 4, P("data")), (P(), P("data"), P())
        mapped = jax.shard_map(
            step, mesh=mesh_of(data=2), in_specs=specs[0], out_specs=specs[1]
        )
        params, _, codes = jax.jit(mapped)(*inputs, X)
    optim.assert_live(params, codes)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip(1.0), WRITER),
        optax.MultiSteps(WRITER, 2),
        optim.with_codes(WRITER),
        WRITER,
    ],
    ids=["chain", "MultiSteps", "with_codes", "TrainState"],
)
def test_writers_in_place_of_optimizers_are_an_error(optimizer):
    params = {"kernel": jnp.ones((128, 128))}
    state = TrainState.create(apply_fn=None, params=params, tx=optimizer)
    with pytest.raises(TypeError, match="the update of a CodeWriter takes codes"):
        state.apply_gradients(grads=params)
