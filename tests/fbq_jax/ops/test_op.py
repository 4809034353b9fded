"""An op is one record, from which all that JAX and the library need follows."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import dot_general, ops, recipes
from fbq_jax.kernels import packing, reference
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import Quantized
from fbq_jax.ops import dispatch
from fbq_jax.ops.op import OPS, Kernel, LocalOp, Op
from fbq_jax.ops.transformations import call
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    ShardingRule,
    factor_names,
    pair_leaves,
)
from tests import gpus
from tests.marks import with_first_fast

MATMUL = (((1,), (0,)), ((), ()))
SEEDS = jnp.zeros(1, jnp.uint32)
THETA = jnp.ones(1)
X = jax.random.normal(jax.random.key(0), (1, 64, 256))
GATED = jax.random.normal(jax.random.key(1), (1, 64, 512))
BLOCK = {"block": (32, 32)}
FUSED_BLOCK = {"block": (32, 128), "bits": 10}
BOTH = {"rowwise": "nearest", "colwise": "nearest"}
ABSMAX = {"criterion": "absmax"}
PRODUCT = {"block_shape": (32, 32, 32), "dtype": jnp.float32}
SLOPES = jax.jit(packing.quantize, static_argnums=1)(X, 10)
CODES = Quantized(jnp.ones((2, 32, 64), jnp.int8), jnp.ones((2, 1, 2)))
TILES = Quantized(jnp.ones((2, 64, 32), jnp.int8), jnp.ones((2, 2, 1)))
ONE_CODES = jax.tree.map(lambda x: x[:1], CODES)
GROUPS = jnp.arange(2)
ROWS = GroupedRows(X[0], *([jnp.ones(1, jnp.int32)] * 2))

# Operands and options of each op.
CALLS = {
    "quantize": ((X, SEEDS), BLOCK | BOTH),
    "quantize_vectors": (
        (X, SEEDS),
        BOTH | {"bound": 127.0, "per_tensor": False},
    ),
    "quantize_row_blocks": (
        (X, SEEDS),
        BLOCK | BOTH | {"colwise_in_blocks": False},
    ),
    "quantize_fallback": ((X, THETA, SEEDS), BLOCK | ABSMAX | {"colwise": None}),
    "move_threshold": (
        (X, X, THETA, *([jnp.ones(1, jnp.int32)] * 2), SEEDS),
        {"target_rate": (0.1, 0.3), "alpha": 1.3},
    ),
    "matmul": ((CODES, None, CODES), PRODUCT | {"reduce": None}),
    "quantize_matmul": (
        (X[:, :32, :64], THETA, ONE_CODES),
        PRODUCT | ABSMAX | {"reduce": None},
    ),
    "rms_norm_quantize": (
        (X, X[:, 0], THETA, SEEDS),
        FUSED_BLOCK | ABSMAX | {"epsilon": 1e-5, "colwise": None},
    ),
    "rms_norm_quantize_row_blocks": (
        (X, X[:, 0], SEEDS),
        FUSED_BLOCK | BOTH | {"epsilon": 1e-5},
    ),
    "silu_gate_quantize_row_blocks": ((GATED, SEEDS), FUSED_BLOCK | BOTH),
    "silu_gate_grad_quantize_row_blocks": (
        (X, SLOPES, SLOPES, SEEDS),
        FUSED_BLOCK | BOTH | {"colwise_in_blocks": True, "sums": ("colwise",)},
    ),
    "silu_gate_quantize": (
        (GATED, THETA, SEEDS),
        FUSED_BLOCK | ABSMAX | {"colwise": None},
    ),
    "silu_gate_grad_quantize": (
        (X, SLOPES, SLOPES, SEEDS, jnp.array([40])),
        FUSED_BLOCK | BOTH | {"interleaved": False},
    ),
    "ragged_quantize": ((ROWS, SEEDS), BLOCK | BOTH),
    "ragged_quantize_fallback": (
        (ROWS, THETA, SEEDS),
        BLOCK | ABSMAX | {"colwise": None},
    ),
    "ragged_matmul": ((CODES, None, CODES, GROUPS), PRODUCT),
    "ragged_contraction": ((TILES, TILES, GROUPS), PRODUCT | {"size": 2}),
}
each_op = pytest.mark.parametrize("name", CALLS)


def shapes_of(name, map_operands=lambda run, operands: run(*operands)):
    operands, options = CALLS[name]
    run = functools.partial(getattr(ops, name), **options)
    return jax.eval_shape(functools.partial(map_operands, run), operands)


def test_every_function_of_ops_has_a_record():
    functions = {name for name, _ in inspect.getmembers(ops, inspect.isfunction)}
    assert functions == set(OPS) == set(CALLS)


@each_op
def test_a_rule_has_a_word_for_every_axis(name):
    operands, options = CALLS[name]
    rule = OPS[name].sharding_rule(*operands, **options)
    pairs = [
        *pair_leaves(rule.operands, operands),
        *pair_leaves(rule.results, shapes_of(name)),
    ]
    assert all(len(words.split()) == array.ndim for words, array in pairs)
    given, made = (
        set("".join(map(factor_names, jax.tree.leaves(side)))) - {UNSHARDED}
        for side in (rule.operands, rule.results)
    )
    assert set(rule.contracted) == given - made
    assert set(rule.splittable) <= made


@each_op
def test_kernels_are_functions_of_modules_and_take_what_the_reference_takes(name):
    """Without importing them: that needs a GPU's libraries."""
    assert set(OPS[name].kernels) <= set(dispatch.IMPLEMENTATIONS)
    options = CALLS[name][1].keys() - {"reduce"}
    parameters = inspect.signature(OPS[name].reference).parameters.values()
    required = (p for p in parameters if p.default is p.empty)
    takes = {p.name for p in required if p.kind is not p.VAR_KEYWORD} | options
    for kernel in OPS[name].kernels.values():
        for module in filter(None, (kernel.module, kernel.blockless_module)):
            origin = Path(importlib.util.find_spec(module).origin)
            is_package = origin.name == "__init__.py"
            (function,) = (
                node
                for file in (origin.parent.glob("*.py") if is_package else [origin])
                for node in ast.parse(file.read_text()).body
                if isinstance(node, ast.FunctionDef) and node.name == name
            )
            arguments = [*function.args.args, *function.args.kwonlyargs]
            passed_on = (
                reference.FallbackOptions
                if "theta" in takes
                else reference.RowBlockOptions
                if name.endswith("row_blocks")
                else reference.QuantizeOptions
            )
            passes_on = set(passed_on.__annotations__) if function.args.kwarg else set()
            assert takes <= {argument.arg for argument in arguments} | passes_on


@each_op
@pytest.mark.parametrize("size", [0, 3])
def test_vmap_maps_every_operand(name, size):
    def mapped(run, operands):
        return jax.vmap(lambda *xs: run(*xs))(
            *jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), operands)
        )

    want = jax.tree.map(lambda x: (size, *x.shape), shapes_of(name))
    assert jax.tree.map(lambda x: x.shape, shapes_of(name, mapped)) == want


@each_op
def test_no_op_has_a_derivative(name):
    def differentiated(run, operands):
        leaves, tree = jax.tree.flatten(operands)
        floats = [i for i, x in enumerate(leaves) if x.dtype == jnp.float32]

        def of_floats(*values):
            changed = [*leaves]
            for i, value in zip(floats, values, strict=True):
                changed[i] = value
            return run(*tree.unflatten(changed))

        primals = [leaves[i] for i in floats]
        return jax.jvp(of_floats, primals, primals)

    with pytest.raises(NotImplementedError, match="no second derivative"):
        shapes_of(name, differentiated)


def test_vmap_stacks_the_matrices_of_a_fused_op():
    x, scale = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 1, 40, 160), (2, 1, 160)])
    )
    theta, seeds = jnp.zeros((2, 1)), jnp.zeros(1, jnp.uint32)
    options = FUSED_BLOCK | ABSMAX | {"epsilon": 1e-5, "colwise": None}
    op = functools.partial(ops.rms_norm_quantize, **options)

    @jax.jit
    def both():
        mapped = jax.vmap(op, (0, 0, 0, None))(x, scale, theta, seeds)
        each = [op(x[i], scale[i], theta[i], seeds) for i in range(2)]
        return mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    jax.tree.map(np.testing.assert_array_equal, *both())


def test_vmap_of_tiles_with_missing_rows():
    """Each example has its own number of rows, or all have the same."""
    options = FUSED_BLOCK | ABSMAX | {"colwise": None, "interleaved": False}

    def op(gate_up, counts):
        return ops.silu_gate_quantize(gate_up, THETA, SEEDS, counts, **options)

    gate_up, counts = jnp.stack([GATED, -GATED]), jnp.array([[40], [32]])

    @functools.partial(jax.jit, static_argnums=0)
    def both(axis, counts):
        mapped = jax.vmap(op, (0, axis))(gate_up, counts)
        own = counts if axis == 0 else jnp.stack([counts] * 2)
        each = [op(gate_up[i], own[i]) for i in range(2)]
        return mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    for axis, given in ((0, counts), (None, counts[0])):
        jax.tree.map(np.testing.assert_array_equal, *both(axis, given))


def test_codes_do_not_depend_on_what_computes_the_operand():
    """XLA keeps the float32 values of a bfloat16 operand that it need not store."""
    x = jax.random.normal(jax.random.key(1), (1, 256, 256), jnp.bfloat16)
    op = functools.partial(ops.quantize, **BLOCK, rowwise="nearest", colwise=None)
    got = jax.jit(lambda x: op(jax.nn.gelu(x), SEEDS))(x)
    want = op(jax.jit(jax.nn.gelu)(x), SEEDS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_vmap_gives_examples_without_seeds_of_their_own_different_noise():
    """Seeds are shared, each example's own, or its own in two of five arrays."""
    x = jnp.broadcast_to(X, (2, *X.shape))
    layer, calls = jnp.arange(2, dtype=jnp.uint32)[:, None], jnp.full((2, 1), 7, "u4")
    op = functools.partial(ops.quantize, **BLOCK, rowwise="stochastic", colwise=None)
    rest = jnp.ones(1, jnp.uint32), SEEDS, SEEDS
    mapped = jax.jit(jax.vmap(op, (0, (0, 0, None, None, None))))
    got = mapped(x, (layer, calls, *rest)).rowwise.codes
    for i in range(2):
        want = jax.jit(op)(x[i], (layer[i], calls[i], *rest)).rowwise.codes
        np.testing.assert_array_equal(got[i], want)
    for seeds in (SEEDS, (SEEDS,) * 5):
        first, second = jax.jit(jax.vmap(op, (0, None)))(x, seeds).rowwise.codes
        assert (first != second).any()


@pytest.mark.parametrize(
    ("reduce", "seeds"), [("int8", None), (None, SEEDS), ("float32", SEEDS)]
)
def test_seeds_are_for_sums_in_int8(reduce, seeds):
    with pytest.raises(ValueError, match=f"reduce={reduce!r} with(out)? seeds"):
        ops.matmul(CODES, None, CODES, reduce=reduce, seeds=seeds, **PRODUCT)


def test_every_op_of_a_layer_goes_through_the_choice(monkeypatch):
    calls = []

    def implementation(op, name, block_shape):
        calls.append((op.name, name, len(block_shape)))
        return op.reference

    monkeypatch.setattr(Op, "implementation", implementation)
    x = jax.ShapeDtypeStruct((999, 5), jnp.float32)  # a shape no other test traces
    for recipe in (recipes.fallback, recipes.fallback_rowwise_bwd):
        dot = functools.partial(dot_general, recipe=recipe)
        jax.eval_shape(jax.grad(lambda x, dot=dot: dot(x, x.T, MATMUL)[0].sum()), x)
    assert set(calls) == {
        ("move_threshold", "reference", 0),
        ("quantize", "reference", 2),
        ("quantize_vectors", "reference", 0),
        ("quantize_fallback", "reference", 2),
        ("matmul", "reference", 3),
        ("matmul", "reference", 0),
    }


def double(x, *, by):
    """Stands for the kernel of a new backend."""
    return x * by


@pytest.mark.parametrize(
    "shape", with_first_fast([(0, 64, 64), (2, 0, 64), (2, 64, 0)])
)
@pytest.mark.parametrize("name", ["quantize", "quantize_vectors", "quantize_fallback"])
def test_no_kernel_starts_on_empty_operands(monkeypatch, name, shape):
    """They give results of the right shapes and dtypes, and scales of 0."""
    record = dataclasses.replace(
        OPS[name], kernels={"tpu": Kernel("tpu", __name__, refusal=lambda _: None)}
    )
    run = LocalOp(record, "tpu", (32, 32))
    monkeypatch.setattr(Op, "implementation", lambda *_: pytest.fail)
    (_, *scalars), options = CALLS[name]
    operands = [jnp.zeros(shape), *(jnp.zeros(shape[0], y.dtype) for y in scalars)]
    got = jax.jit(functools.partial(run, **options))(*operands)
    want = jax.eval_shape(functools.partial(record.reference, **options), *operands)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert not any(map(np.any, jax.tree.leaves(got)))


def test_one_record_makes_a_new_op_and_one_entry_a_new_backend(monkeypatch):
    record = Op(
        double,
        sharding_rule=lambda *_, **__: ShardingRule(("b i j",), "b i j"),
        on_shard=lambda run, _, operands, options: run(*operands, **options),
        kernels={"tpu": Kernel("tpu", __name__, refusal=lambda _: None)},
    )
    monkeypatch.setitem(OPS, "double", record)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", ("tpu", "reference"))
    assert dispatch.choose("double", ()).implementation == "tpu"

    @jax.jit
    def run(x):
        return jax.vmap(lambda x: call(record, (x,), (), {"by": 2.0}, None))(x)

    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "a")
    x = jax.device_put(X[None], jax.sharding.NamedSharding(mesh, spec))
    np.testing.assert_array_equal(run(x), 2 * X[None])
    assert run(x).sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("name", ["quantize", "quantize_vectors"])
def test_on_one_device_a_kernel_is_traced_without_its_reference(name, monkeypatch):
    gpus.replace_triton_kernels(monkeypatch)
    operands, options = CALLS[name]
    quantize = functools.partial(getattr(ops, name), **options)
    program = str(jax.make_jaxpr(quantize)(*operands))
    assert "triton_kernel" in program
    assert "platform_index" not in program
