"""The warnings of NNX layers name the layers, once a cause."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import Recipe, recipes
from fbq_jax.nnx import (
    FallbackConv,
    FallbackDot,
    FallbackEinsum,
    Int8MLP,
    name_layers,
    quantize,
)
from fbq_jax.sharding import layer_names
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices
from tests.marks import rows_with_first_fast

pytestmark = pytest.mark.usefixtures("every_cause_warns")
RECIPE = Recipe(block=32)
X = jnp.ones((64, 128))
HINT = r" \(fbq_jax.nnx.name_layers gives layers their paths\)"


class Block(nnx.Module):
    def __init__(self, rngs, dot):
        self.up = nnx.Linear(128, 128, use_bias=False, dot_general=dot, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


@needs_devices
@pytest.mark.parametrize(
    ("scope", "named", "name"),
    rows_with_first_fast(
        [
            ("", False, rf"nnx.FallbackDot with a kernel \[128, 128\]{HINT}"),
            ("encoder", False, rf"encoder/nnx.FallbackDot with a ke.* 128\]{HINT}"),
            ("", True, "block/up"),
        ]
    ),
)
def test_a_misaligned_weight_gives_one_warning_with_its_layer(scope, named, name):
    """By its kernel and scope, or by its path; with 16 rows of the kernel a device."""
    model = nnx.Dict(block=Block(nnx.Rngs(0), FallbackDot(RECIPE, rngs=nnx.Rngs(1))))
    if named:
        name_layers(model)
    sharding = NamedSharding(mesh_of(fsdp=8), P("fsdp"))
    graphdef, params, state = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding), params
    )

    def loss(params, state, x):
        with jax.named_scope(scope):
            return nnx.merge(graphdef, params, state, copy=True).block(x).sum()

    step = jax.jit(jax.grad(loss), out_shardings=sharding)
    with warnings.catch_warnings(record=True, action="always") as caught:
        step.lower(params, state, X).compile()
    (warning,) = caught
    assert re.match(f"{name}: axis . of .* over fsdp=8", str(warning.message))


def current_name(function, *args):
    """The name of the layer whose ops are traced when the function is called."""
    names = []
    original = layer_names.record_layer

    def record(op, operands):
        names.append(layer_names.current_layer())
        original(op, operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fbq_jax.ops.op.record_layer", record)
        nnx.eval_shape(function, *args)
    return set(names)


def test_layers_of_every_kind_have_names():
    rngs = nnx.Rngs(0)

    class Layers(nnx.Module):
        def __init__(self):
            self.conv = nnx.Conv(
                3, 8, (4, 4), 4, conv_general_dilated=FallbackConv(RECIPE), rngs=rngs
            )
            self.einsum = nnx.Einsum(
                "td,df->tf", (8, 4), einsum_op=FallbackEinsum(RECIPE), rngs=rngs
            )
            self.mlp = Int8MLP(8, 16, rngs=rngs)

    model = Layers()
    images = jnp.ones((2, 16, 16, 3))
    width = "nnx.Int8MLP of width 8"
    (unnamed,) = current_name(lambda m: m.mlp(jnp.ones((2, 8))), model)
    assert re.fullmatch(width + HINT, unnamed)
    name_layers(model)
    assert current_name(lambda m: m.conv(images), model) == {"conv"}
    assert current_name(lambda m: m.einsum(jnp.ones((2, 8))), model) == {"einsum"}
    assert current_name(lambda m: m.mlp(jnp.ones((2, 8))), model) == {"mlp"}
    name_layers(model.einsum)
    assert current_name(lambda m: m(jnp.ones((2, 8))), model.einsum) == {"Einsum"}


def test_rules_name_the_layers_that_they_leave_alone():
    model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    model.value.dot_general = nnx.data(FallbackDot(RECIPE))
    quantize(model, {"query": recipes.fallback})
    dots = [layer.dot_general for layer in (model.query, model.value)]
    assert [dot.path.name for dot in dots] == ["query", "value"]


def test_names_change_neither_state_nor_what_is_compiled():
    blocks = [Block(nnx.Rngs(i), FallbackDot(RECIPE)) for i in range(2)]
    graphdef, state = nnx.split(blocks[0])
    name_layers(nnx.List(blocks))
    assert [block.up.dot_general.path.name for block in blocks] == ["0/up", "1/up"]
    named, named_state = nnx.split(blocks[0])
    assert graphdef == named == nnx.graphdef(blocks[1])
    assert hash(graphdef) == hash(named)
    assert jax.tree.structure(state) == jax.tree.structure(named_state)
    assert nnx.merge(graphdef, state).up.dot_general.path.name is None
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    assert stacked.up.kernel.shape == (2, 128, 128)

    traces = []

    @nnx.jit
    def forward(block, x):
        traces.append(block.up.dot_general.path.name)
        return block(x)

    for block in blocks:
        forward(block, X)
    assert traces == ["0/up"]
