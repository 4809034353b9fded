"""Several devices: what they gather of weights, and whether codes are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fbq_jax import fallback_dot, optim, quantize_weights_once
from tests.collectives import collectives
from tests.fbq_jax.optim.tools import BF16
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices, place
from tests.marks import with_first_fast

pytestmark = needs_devices
WIDTH = 512
ADAMW = optax.adamw(1e-3)
WRITER = optim.with_codes(ADAMW)
# The mesh axes of the last axes of weights and their moments.
AXES = {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")}
X = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)).astype(jnp.bfloat16)


class MLP(nn.Module):
    dot: object

    @nn.compact
    def __call__(self, x, _):
        options = {"use_bias": False, "dtype": x.dtype, "dot_general": self.dot}
        hidden = nn.gelu(nn.Dense(WIDTH, name="up", **options)(x))
        return x + nn.Dense(WIDTH, name="down", **options)(hidden), None


class Model(nn.Module):
    """Equal layers in a loop, which gathers weights where it reads them."""

    dot: object = fallback_dot

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(
            MLP,
            variable_axes={"params": 0, "fallback": 0, "fallback_codes": 0},
            split_rngs={"params": True},
            length=2,
        )
        return loop(self.dot, name="layers")(x, None)[0]


def shard(tree):
    """Shards the weights of a model, and arrays like them, over the mesh in use."""
    names = jax.sharding.get_abstract_mesh().shape

    def constrain(path, x):
        of = next((AXES[k.key] for k in path if getattr(k, "key", "") in AXES), ())
        axes = [axis if axis in names else None for axis in of]
        spec = P(None, *axes) if x.ndim == 3 else P()
        return jax.lax.with_sharding_constraint(x, spec)

    return jax.tree.map_with_path(constrain, tree)


def train_step(writer, dot=fallback_dot):
    """The inputs of a step and the step, with codes if there is a writer."""
    model = Model(dot)

    @jax.jit
    def init(x):
        variables = model.init(jax.random.key(1), x)
        params, codes = shard(variables.pop("params")), {}
        if writer is not None:
            codes = quantize_weights_once(model, {**variables, "params": params}, x)
        return params, shard((writer or ADAMW).init(params)), variables, codes

    @jax.jit
    def step(params, opt_state, state, codes, x):
        def loss(params):
            of_call = {"params": params, **state, **codes}
            y, _ = model.apply(of_call, x, mutable=["fallback"])
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        if writer is None:
            updates, opt_state = ADAMW.update(
                shard(jax.grad(loss)(params)), opt_state, params
            )
            params = optax.apply_updates(params, updates)
        else:
            grads = shard(jax.grad(loss)(writer.differentiable(params, codes)))
            params, opt_state, codes = writer.update(grads, opt_state, params, codes)
        return shard(params), shard(opt_state), state, codes

    return init, step


@functools.cache
def over_mesh(writer, dot=fallback_dot, **sizes):
    """The inputs of a step over a mesh, its results and its collectives."""
    init, step = train_step(writer, dot)
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        x = place(mesh, X, "fsdp" if "fsdp" in sizes else None)
        inputs = init(x)
        compiled = step.lower(*inputs, x).compile()
        return inputs, compiled(*inputs, x), collectives(compiled)


FSDP = {"fsdp": 4, "tensor": 2}, {"fsdp": 4}
TENSOR = {"tensor": 4}


@pytest.mark.parametrize("sizes", with_first_fast(FSDP), ids=str)
def test_codes_are_gathered_in_place_of_floats(sizes):
    """At most 0.52 of the bytes that bfloat16 gathers, scales included."""
    weight = WIDTH * WIDTH // sizes.get("tensor", 1)
    _, _, found = over_mesh(WRITER, **sizes)
    gathers = [c for c in found if c.kind == "all-gather"]
    codes = [c for c in gathers if c.size == weight]
    others = [c for c in gathers if c.size != weight]
    _, _, found = over_mesh(None, jax.lax.dot_general, **sizes)
    floats = [c for c in found if c.kind == "all-gather" and c.size == weight]
    assert {c.dtype for c in codes} == {"s8"}
    assert len(codes) == len(floats) == 4  # up and down, forward and backward
    assert {c.dtype for c in others} == {"f32"}
    # CPUs gather bfloat16 as float32.
    ratio = sum(c.bytes for c in [*codes, *others]) / sum(2 * c.size for c in floats)
    assert ratio < 0.501


@pytest.mark.exhaustive
def test_tensor_parallelism_gathers_no_weights():
    _, _, found = over_mesh(WRITER, **TENSOR)
    assert [c for c in found if c.kind != "all-reduce" and c.size > 16] == []


@pytest.mark.parametrize("sizes", with_first_fast([*FSDP, TENSOR]), ids=str)
def test_codes_are_those_of_one_device(sizes):
    inputs, after, _ = over_mesh(WRITER, **sizes)
    for params, _, _, codes in (inputs, after):
        optim.assert_live(*jax.device_get((params, codes)))
    parts = int(np.prod([*sizes.values()]))
    for old, new in zip(*map(jax.tree.leaves, (inputs[3], after[3])), strict=True):
        assert old.sharding.is_equivalent_to(new.sharding, new.ndim)
        assert np.prod(new.sharding.shard_shape(new.shape)) * parts == new.size


@pytest.mark.parametrize("kind", with_first_fast([AxisType.Explicit, AxisType.Auto]))
def test_axes_of_a_mesh(kind):
    mesh, writer = mesh_of(kind, data=2), WRITER
    model = nn.Dense(256, use_bias=False, **BF16)
    x = jax.random.normal(jax.random.key(0), (256, 256)).astype(jnp.bfloat16)
    variables = model.init(jax.random.key(1), x)
    with jax.set_mesh(mesh):
        x = place(mesh, x, "data")
        params = {"kernel": place(mesh, variables["params"]["kernel"], "data")}
        variables = {"params": params, "fallback": variables["fallback"]}
        codes = jax.jit(lambda v: quantize_weights_once(model, v, x))(variables)

        @jax.jit
        def step(params, state, codes):
            grads = writer.differentiable(params, codes)
            return writer.update(grads, state, params, codes)

        params, _, codes = step(params, writer.init(params), codes)
    optim.assert_live(*jax.device_get((params, codes)))
    rowwise = codes["fallback_codes"]["dot_general"].codes.rowwise
    assert rowwise.codes.sharding.shard_shape((1, 256, 256)) == (1, 128, 256)
