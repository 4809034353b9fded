"""Products of codes summed in INT32: any number of devices gives the bits of one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    FallbackDot,
    Gemm,
    Recipe,
    RecipeError,
    dot_general,
    freeze,
    ops,
    recipes,
)
from fbq_jax.kernels.quantized import Layout
from fbq_jax.kernels.reference import MAX_INT32_K
from tests.collectives import collectives
from tests.fbq_jax.core.test_dot_general import MATMUL
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices, place
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = [needs_devices, pytest.mark.usefixtures("every_cause_warns")]
TOKENS, CHANNELS, HIDDEN = 256, 128, 512
SEEDS = jnp.asarray([7], jnp.uint32)


def with_reduce(recipe, reduce="int32"):
    """The recipe with such sums in each of its quantized GEMMs."""
    gemms = {name: getattr(recipe, name) for name in ("fwd", "dlhs", "drhs")}
    changed = {
        name: dataclasses.replace(gemm, reduce=reduce)
        for name, gemm in gemms.items()
        if not gemm.in_floats
    }
    return dataclasses.replace(recipe, **changed)


class MLP(nn.Module):
    """The weights of the second layer are sharded along its contraction."""

    dot: FallbackDot
    dtype: str

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dot_general=self.dot, dtype=self.dtype)
        hidden = dense(HIDDEN, name="up")(x)
        return x + dense(CHANNELS, use_bias=False, name="down")(nn.silu(hidden))


def shard(mesh, params):
    """The usual shards of tensor parallelism."""
    (up, down), bias = (
        (params[n]["kernel"] for n in ("up", "down")),
        params["up"]["bias"],
    )
    up = {
        "kernel": place(mesh, up, None, "tensor"),
        "bias": place(mesh, bias, "tensor"),
    }
    return {"up": up, "down": {"kernel": place(mesh, down, "tensor")}}


@functools.cache
def variables_of(model):
    x = heavy((TOKENS, CHANNELS)).astype(model.dtype)
    return jax.jit(model.init)(jax.random.key(1), x)


def results(recipe, dtype, data, tensor):
    """Y and the gradients of the kernels and of x, and the program's collectives."""
    model = MLP(FallbackDot(recipe), dtype)
    x = heavy((TOKENS, CHANNELS)).astype(dtype)
    variables = variables_of(model)

    def step(params, x):
        def loss(params, x):
            both = variables | {"params": params}
            y, _ = model.apply(both, x, mutable=["fallback"])
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (grads, dx), y = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        return y, [grads[name]["kernel"] for name in ("up", "down")], dx

    mesh = mesh_of(data=data, tensor=tensor)
    arguments = shard(mesh, variables["params"]), place(mesh, x, "data")
    run = jax.jit(step).lower(*arguments).compile()
    return jax.tree.map(np.asarray, run(*arguments)), collectives(run)


@pytest.mark.parametrize(
    ("name", "dtype"),
    rows_with_first_fast(
        [
            ("rowwise", "bfloat16"),
            ("rowwise", "float32"),
            ("switchback", "bfloat16"),
            ("switchback_q", "float32"),
            ("aqt_int8", "bfloat16"),
        ]
    ),
)
def test_any_number_of_devices_gives_the_bits_of_one(name, dtype):
    """In Y and dX, and in dW, whose contraction is the tokens."""
    recipe = with_reduce(recipes.NAMED[name])
    want, found = results(recipe, dtype, 1, 1)
    assert not found
    for data, tensor in [(1, 2), (1, 4), (1, 8), (2, 4)]:
        got, found = results(recipe, dtype, data, tensor)
        sums = [c.dtype for c in found if c.size >= 1000]
        if data == 1 or not recipe.drhs.in_floats:
            jax.tree.map(np.testing.assert_array_equal, got, want)
            assert {*sums} == {"s32"}
        else:
            jax.tree.map(np.testing.assert_array_equal, got[::2], want[::2])  # Y, dX
            assert {*sums} == {"s32", "f32"}  # dW, by XLA


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduce", [None, "float32"])
def test_sums_in_floats_differ(reduce):
    recipe = with_reduce(recipes.rowwise, reduce)
    (want, _), (got, _) = (results(recipe, "float32", 1, size) for size in (1, 8))
    assert (got[0] != want[0]).any()


# The mesh axes of x, W and Y, and the collectives that sum and their sizes.
LAYOUTS = {
    "whole": (P(None, "a"), P("a"), P(), [("all-reduce", 128 * 96)]),
    "rows": (P(None, "a"), P("a"), P("a"), [("reduce-scatter", 32 * 96)]),
    "columns": (P(None, "a"), P("a"), P(None, "a"), [("reduce-scatter", 128 * 24)]),
    "a part": (
        *(P(None, ("a", "b")), P(("a", "b")), P(None, "a")),
        [("reduce-scatter", 128 * 24), ("all-reduce", 128 * 24)],
    ),
    "other rows": (P("b", "a"), P("a"), P("b"), [("all-reduce", 64 * 96)]),
}


@pytest.mark.parametrize("name", with_first_fast(LAYOUTS))
def test_each_device_scales_its_part_of_a_sum(name):
    *specs, result, sums = LAYOUTS[name]
    operands = heavy((128, HIDDEN)), heavy((HIDDEN, 96), 1)
    mesh = mesh_of(a=4, b=2)
    placed = [place(mesh, x, *spec) for x, spec in zip(operands, specs, strict=True)]

    def multiply(x, w):
        return dot_general(x, w, MATMUL, recipe=with_reduce(recipes.rowwise))[0]

    sharding = NamedSharding(mesh, result)
    run = jax.jit(multiply, out_shardings=sharding).lower(*placed).compile()
    np.testing.assert_array_equal(run(*placed), jax.jit(multiply)(*operands))
    found = [c for c in collectives(run) if c.size >= 1000]
    assert [(c.kind, c.size) for c in found] == sums
    assert {c.dtype for c in found} == {"s32"}


@pytest.mark.exhaustive
def test_a_stack_of_rows_and_of_matrices():
    """Rows in two axes, and matrices in one."""
    recipe, mesh = with_reduce(recipes.rowwise), mesh_of(a=4, b=2)
    x, w = heavy((2, 64, HIDDEN)), heavy((2, HIDDEN, 96), 1)
    for weight, spec, dims in [
        (w[0], ("a",), (((2,), (0,)), ((), ()))),
        (w, (None, "a"), (((2,), (1,)), ((0,), (0,)))),
    ]:

        def multiply(x, w, dims=dims):
            return dot_general(x, w, dims, recipe=recipe)[0]

        want = jax.jit(multiply)(x, weight)
        for rows in ("a", "b"):
            out = NamedSharding(mesh, P(None, rows))
            run = jax.jit(multiply, out_shardings=out)
            got = run(place(mesh, x, None, None, "a"), place(mesh, weight, *spec))
            np.testing.assert_array_equal(got, want)


def test_a_frozen_layer_decodes_the_same_bits():
    layer = nn.Dense(96, dot_general=FallbackDot(with_reduce(recipes.rowwise)))
    x = heavy((64, HIDDEN))
    variables = layer.init(jax.random.key(1), x)
    want = jax.jit(layer.apply)(variables, x)
    frozen = freeze(layer, variables, x)
    mesh = mesh_of(tensor=4)
    weight = frozen["fallback"]["dot_general"]["weight"]

    def place_codes(y):
        return place(mesh, y, None, None, "tensor" if y.shape[2] > 1 else None)

    weight = jax.tree.map(place_codes, weight)
    frozen["fallback"]["dot_general"]["weight"] = weight
    token = place(mesh, x[7:8], None, "tensor")
    run = jax.jit(layer.apply).lower(frozen, token).compile()
    np.testing.assert_array_equal(run(frozen, token), want[7:8])
    assert ("all-reduce", "s32", 96) in {c[:3] for c in collectives(run)}


@pytest.mark.parametrize(
    "how",
    [
        {"fwd": Gemm(reduce="int32")},
        {"fwd": Gemm(scales=("row_block", "block"), reduce="int32"), "criterion": None},
        {"drhs": Gemm(rhs="stochastic", scales="row", shards=4, reduce="int32")},
    ],
    ids=["blocks", "row blocks", "shards"],
)
def test_sums_of_scaled_products_are_an_error(how):
    match = r"reduce takes 'int32' only with scales 'row' or 'tensor' .*, in floats"
    with pytest.raises(RecipeError, match=match):
        Recipe(**how)


def test_a_contraction_that_int32_cannot_sum_is_an_error():
    x, w = jnp.ones((2, MAX_INT32_K + 1)), jnp.ones((MAX_INT32_K + 1, 2))
    match = r"sums up to 131072 products exactly, and this contraction has 131073"
    with pytest.raises(ValueError, match=match):
        dot_general(x, w, MATMUL, recipe=with_reduce(recipes.rowwise))


@pytest.mark.parametrize(
    ("block", "message"), [((1, 32), "got scales"), ((1, None), None)]
)
def test_the_op_takes_one_scale_along_the_contraction(block, message):
    layout = Layout("nearest", block)
    x = ops.quantize(heavy((1, 8, 64)), SEEDS, rowwise=layout, colwise=None).rowwise
    multiply = functools.partial(ops.matmul, x, x, dtype="float32", reduce="int32")
    if message is None:
        np.testing.assert_array_equal(multiply(), ops.matmul(x, x, dtype="float32"))
        return
    with pytest.raises(ValueError, match=message):
        multiply()


def test_devices_cannot_share_an_ordered_sum():
    recipe = recipes.row_block_lhs
    fwd = dataclasses.replace(recipe.fwd, ordered=True)
    recipe = dataclasses.replace(recipe, fwd=fwd)
    mesh = mesh_of(tensor=2)
    x, w = place(mesh, heavy((128, 256)), None, "tensor"), heavy((256, 128), 1)
    w = place(mesh, w, "tensor")
    # XLA's, because it chooses who shares what; it has the ValueError's text.
    error, text = (
        jax.errors.JaxRuntimeError,
        "ordered=True.*devices share the contraction",
    )
    with pytest.raises(error, match=text):
        jax.jit(lambda x, w: dot_general(x, w, MATMUL, recipe=recipe)[0])(x, w)
