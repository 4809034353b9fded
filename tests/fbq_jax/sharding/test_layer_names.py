"""Warnings name the layers that they concern, once a cause."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import FallbackDot, Recipe, ops, quantize_weights_once
from fbq_jax.kernels.quantized import Layout
from fbq_jax.sharding.layer_names import clear, current_layer, layer_name
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices, place
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("every_cause_warns")
RECIPE = Recipe(block=32)
X = jnp.ones((64, 128))


class Block(nn.Module):
    """A layer, in a method that lifted transformations take."""

    @nn.compact
    def __call__(self, x, _=None):
        dot = FallbackDot(RECIPE)
        y = nn.Dense(128, use_bias=False, dot_general=dot, name="up")(x)
        return y, None


LIFTS = {
    "scan": functools.partial(
        nn.scan,
        variable_axes={"params": 0, "fallback": 0},
        split_rngs={"params": True},
        length=2,
    ),
    "plain": lambda block: block,
    "remat": nn.remat,
}


class Model(nn.Module):
    """One block, or two of them under a lifted transformation."""

    kind: str

    @nn.compact
    def __call__(self, x):
        return LIFTS[self.kind](Block)(name="block")(x, None)[0]


@needs_devices
@pytest.mark.parametrize("kind", with_first_fast(LIFTS))
def test_a_misaligned_weight_gives_one_warning_with_the_layers_path(kind):
    """Every op of the layer, forward and backward, meets the same 16 rows a device."""
    model = Model(kind)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    rows = P(None, "fsdp") if kind == "scan" else P("fsdp")
    sharding = NamedSharding(mesh_of(fsdp=8), rows)
    params = jax.tree.map(lambda p: p.update(sharding=sharding), variables["params"])

    def loss(params, state, x):
        variables = {"params": params, "fallback": state}
        return model.apply(variables, x, mutable=["fallback"])[0].sum()

    step = jax.jit(jax.grad(loss), out_shardings=sharding)
    with warnings.catch_warnings(record=True, action="always") as caught:
        step.lower(params, variables["fallback"], X).compile()
    (warning,) = caught
    assert re.match(
        "block/up: axis . of .* is sharded over fsdp=8, but shards are not multiples "
        r"of 32: .*\. Pad the axis or shard another one\.",
        str(warning.message),
    )


@needs_devices
def test_a_weight_whose_codes_are_made_once_has_its_layers_path():
    model = Model("plain")
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    sharding = NamedSharding(mesh_of(fsdp=8), P("fsdp"))
    params = jax.tree.map(lambda p: p.update(sharding=sharding), variables["params"])
    make = jax.jit(lambda variables: quantize_weights_once(model, variables, X))
    clear()  # of the names that init recorded
    with pytest.warns(UserWarning, match="^block/up: axis . of .* over fsdp=8"):
        make.lower({**variables, "params": params}).compile()


@needs_devices
def test_layers_that_share_a_traced_op_are_all_named():
    """And only those that have not been warned of."""
    x = place(mesh_of(fsdp=8), X[None], None, "fsdp")
    layouts = {"rowwise": Layout("nearest", (32, 32)), "colwise": None}

    def layers(*names):
        def run(x):
            results = []
            for name in names:
                with layer_name(name):
                    found = ops.quantize(x, jnp.zeros(1, jnp.uint32), **layouts)
                    results.append(found.rowwise.codes)
            return results

        jax.jit(run).lower(x).compile()

    with pytest.warns(UserWarning, match="^a, b, c and 1 more layers: axis 1 of"):
        layers("a", "b", "c", "d")
    with warnings.catch_warnings(action="error"):
        layers("a")
    with pytest.warns(UserWarning, match="^e: axis 1 of"):
        layers("e")


def test_without_a_layer_there_is_no_name():
    assert current_layer() is None
    with jax.named_scope("encoder"), jax.named_scope("up"):
        assert current_layer() == "encoder/up"
        with layer_name("decoder/up"):
            assert current_layer() == "decoder/up"
    assert current_layer() is None
