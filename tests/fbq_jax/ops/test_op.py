"""An op is one record, from which all that JAX and the library need follows."""

import ast
import functools
import importlib.util
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import dot_general, ops, recipes
from fbq_jax.core.visitors import Visitor, visiting
from fbq_jax.kernels import packing
from fbq_jax.kernels.layer_sources import Gate, GateGrad, Norm
from fbq_jax.kernels.quantized import Layout, Quantized, Term, Unquantized
from fbq_jax.kernels.rounding import MatrixSeeds
from fbq_jax.kernels.sources import Matrix
from fbq_jax.ops import backends, dispatch
from fbq_jax.ops import op as op_module
from fbq_jax.ops.backends import Reference
from fbq_jax.ops.dispatch import BACKENDS, OPS, Backend, Request
from fbq_jax.ops.op import LocalOp, Op, call
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
PACKED = jax.jit(lambda x: packing.as_words(packing.quantize(x, 10)))(
    jnp.stack([X, X], 1)
)
PRODUCT = {"dtype": jnp.float32}
ONE = jnp.ones(1, jnp.int32)
TILES = Matrix(X[0], ONE, ONE, 32)
GROUPS = jnp.arange(2)


def codes(shape, scales, block):
    return Quantized(Term(jnp.ones(shape, jnp.int8), jnp.ones(scales)), None, block)


CODES = codes((2, 32, 64), (2, 1, 2), (32, 32))
TRANSPOSED = codes((2, 64, 32), (2, 2, 1), (32, 32))


def layouts(rowwise, colwise=None, criterion=None):
    """Options of ``quantize``: blocks of both layouts, rounded to nearest."""
    return {
        "rowwise": rowwise and Layout("nearest", rowwise),
        "colwise": colwise and Layout("nearest", colwise),
        "criterion": criterion,
    }


BLOCKS = layouts((32, 32), (32, 32))

FUSED = layouts((32, 128), (32, 128))
FALLBACK = layouts((32, 128), None, "absmax")
SMALL_FALLBACK = layouts((32, 32), None, "absmax")
FUSED_ROWS = layouts((1, 128), (32, 1))
SUMS = BLOCKS | {"rowwise": Layout("nearest", (32, 32), sums=True)}
ROWS = 40 * ONE


def quantize_call(source, options, theta=None):
    return "quantize", (source, SEEDS, theta), options


# The op of each call, its operands and its options.
CALLS = {
    "blocks": quantize_call(Matrix(X), BLOCKS),
    "sums": quantize_call(Matrix(X), SUMS),
    "vectors": quantize_call(Matrix(X), layouts((1, None), (None, 1))),
    "tensor": quantize_call(Matrix(X), layouts((None, None))),
    "row blocks": quantize_call(Matrix(X), layouts((1, 32), (32, 1))),
    "fallback": quantize_call(Matrix(X), SMALL_FALLBACK, THETA),
    "norm": quantize_call(Norm(X, X[:, 0], 1e-5, 10), FALLBACK, THETA),
    "norm, row blocks": quantize_call(Norm(X, X[:, 0], 1e-5, 10), FUSED_ROWS),
    "gate": quantize_call(Gate(GATED, None, 10), FALLBACK, THETA),
    "gate, row blocks": quantize_call(Gate(GATED, None, 10), FUSED_ROWS),
    "gate's gradient": quantize_call(GateGrad(X, PACKED, None, 10), FUSED),
    "gate's gradient of rows": quantize_call(
        GateGrad(X, PACKED, ROWS, 10, interleaved=False), FUSED
    ),
    "gate of rows": quantize_call(
        Gate(GATED, ROWS, 10, interleaved=False), FALLBACK, THETA
    ),
    "tiles": quantize_call(TILES, BLOCKS),
    "tiles, fallback": quantize_call(TILES, SMALL_FALLBACK, THETA),
    "matmul": ("matmul", (CODES, CODES, None), PRODUCT),
    "matmul of floats": (
        "matmul",
        (
            Unquantized(X[:, :32, :64], THETA, (32, 32), "absmax"),
            jax.tree.map(lambda x: x[:1], CODES),
            None,
        ),
        PRODUCT,
    ),
    "matmul in groups": ("matmul", (CODES, CODES, GROUPS), PRODUCT),
    "contract": ("contract", (TRANSPOSED, TRANSPOSED, GROUPS), PRODUCT | {"size": 2}),
    "move_threshold": (
        "move_threshold",
        (X, X, THETA, ONE, ONE, SEEDS),
        {"target_rate": (0.1, 0.3), "alpha": 1.3},
    ),
}
each_call = pytest.mark.parametrize("name", CALLS)


def shapes_of(name, map_operands=lambda run, operands: run(*operands)):
    op, operands, options = CALLS[name]
    run = functools.partial(getattr(ops, op), **options)
    return jax.eval_shape(functools.partial(map_operands, run), operands)


def test_every_function_of_ops_has_a_record():
    functions = {name for name, _ in inspect.getmembers(ops, inspect.isfunction)}
    assert functions == set(OPS) == {op for op, *_ in CALLS.values()}


@each_call
def test_a_rule_has_a_word_for_every_axis(name):
    op, operands, options = CALLS[name]
    operands = (*operands, None) if op == "matmul" else operands  # without seeds
    rule = OPS[op].sharding_rule(*operands, **options)
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


def imported_kernels():
    """What the backends import: the file, and the function or None for all."""
    for node in ast.walk(ast.parse(Path(backends.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.col_offset:
            (name,) = (alias.name for alias in node.names)
            folder = Path(importlib.util.find_spec(node.module).origin)
            is_package = folder.name == "__init__.py"
            file = folder.with_name(f"{name}.py") if is_package else folder
            yield file, None if is_package else name


@pytest.mark.parametrize(
    ("file", "name"),
    [*imported_kernels()],
    ids=lambda value: "/".join(value.parts[-2:]) if isinstance(value, Path) else value,
)
def test_kernels_take_what_the_reference_takes(file, name):
    """Without importing them: that needs a GPU's libraries."""
    functions = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in ({name} if name else OPS)
    ]
    assert functions
    for function in functions:
        parameters = inspect.signature(OPS[function.name].reference).parameters
        arguments = function.args
        named = {x.arg for x in [*arguments.args, *arguments.kwonlyargs]}
        required = {p.name for p in parameters.values() if p.default is p.empty}
        assert required <= named


@each_call
@pytest.mark.parametrize("size", [0, 3])
def test_vmap_maps_every_operand(name, size):
    def mapped(run, operands):
        return jax.vmap(lambda *xs: run(*xs))(
            *jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), operands)
        )

    want = jax.tree.map(lambda x: (size, *x.shape), shapes_of(name))
    assert jax.tree.map(lambda x: x.shape, shapes_of(name, mapped)) == want


@each_call
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


@pytest.mark.parametrize("name", ["norm", "gate of rows", "tiles, fallback"])
def test_vmap_computes_what_each_example_does(name):
    """Whether examples have operands of their own or share some."""
    op, (source, seeds, theta), options = CALLS[name]
    run = functools.partial(getattr(ops, op), **options)
    sources = jax.tree.map(lambda x: jnp.stack([x, x * 3 // 4]), source)

    @jax.jit
    def both():
        mapped = jax.vmap(run, (0, None, 0))(sources, seeds, jnp.stack([theta, theta]))
        each = [
            run(jax.tree.map(lambda x, i=i: x[i], sources), seeds, theta)
            for i in range(2)
        ]
        return mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    jax.tree.map(np.testing.assert_array_equal, *both())


def test_vmap_gives_examples_without_seeds_of_their_own_different_noise():
    """Seeds are shared, each example's own, or its own in two of three arrays."""
    x = jnp.broadcast_to(X, (2, *X.shape))
    layer, calls = jnp.arange(2, dtype=jnp.uint32)[:, None], jnp.full((2, 1), 7, "u4")
    noisy = Layout("stochastic", (32, 32))
    op = functools.partial(ops.quantize, rowwise=noisy, colwise=None)
    place = jnp.full(1, 8, jnp.uint32)
    mapped = jax.jit(jax.vmap(op, (0, MatrixSeeds(0, 0, None))))
    got = mapped(x, MatrixSeeds(layer, calls, place)).rowwise.codes
    for i in range(2):
        want = jax.jit(op)(x[i], MatrixSeeds(layer[i], calls[i], place)).rowwise.codes
        np.testing.assert_array_equal(got[i], want)
    for seeds in (SEEDS, MatrixSeeds(*[SEEDS] * 3)):
        first, second = jax.jit(jax.vmap(op, (0, None)))(x, seeds).rowwise.codes
        assert (first != second).any()


@pytest.mark.parametrize(
    ("reduce", "seeds"), [("int8", None), (None, SEEDS), ("float32", SEEDS)]
)
def test_seeds_are_for_sums_in_int8(reduce, seeds):
    with pytest.raises(ValueError, match=f"reduce={reduce!r} with(out)? seeds"):
        ops.matmul(CODES, CODES, reduce=reduce, seeds=seeds, **PRODUCT)


def test_every_op_of_a_layer_goes_through_the_choice(monkeypatch):
    calls, choose = set(), dispatch.choose_for

    def recorded(request, implementation):
        calls.add((request.op, len(request.sides)))
        return choose(request, implementation)

    monkeypatch.setattr(dispatch, "choose_for", recorded)
    x = jax.ShapeDtypeStruct((999, 5), jnp.float32)  # a shape no other test traces
    for recipe in (recipes.fallback, recipes.fallback_rowwise_bwd):
        dot = functools.partial(dot_general, recipe=recipe, key=jax.random.key(0))
        jax.eval_shape(jax.grad(lambda x, dot=dot: dot(x, x.T, MATMUL)[0].sum()), x)
    assert calls == {
        ("move_threshold", 0),
        ("quantize", 4),
        ("quantize", 2),
        ("quantize", 0),
        ("matmul", 3),
        ("matmul", 0),
    }


class New(Backend):
    """A new backend."""

    name = "new"
    quantize = staticmethod(pytest.fail)

    @staticmethod
    def double(x, *, by):
        return x * by


def double(x, *, by):
    """The definition of a new op."""
    return x * by


@pytest.mark.parametrize(
    "shape", with_first_fast([(0, 64, 64), (2, 0, 64), (2, 64, 0)])
)
@pytest.mark.parametrize("name", ["blocks", "vectors", "fallback"])
def test_no_kernel_starts_on_empty_operands(name, shape):
    """They give results of the right shapes and dtypes, and scales of 0."""
    op, (_, *scalars), options = CALLS[name]
    run = LocalOp(OPS[op], New(), "new")
    scalars = [y if y is None else jnp.zeros(shape[0], y.dtype) for y in scalars]
    operands = Matrix(jnp.zeros(shape)), *scalars
    got = jax.jit(functools.partial(run, **options))(*operands)
    want = jax.eval_shape(functools.partial(OPS[op].reference, **options), *operands)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert not any(map(np.any, jax.tree.leaves(got)))


def test_one_record_makes_a_new_op_and_one_object_a_new_backend(monkeypatch):
    monkeypatch.setattr(Reference, "double", staticmethod(double), raising=False)
    record = Op(
        "double",
        request=lambda *_, **__: Request("double", ()),
        sharding_rule=lambda *_, **__: ShardingRule(("b i j",), "b i j"),
        on_shard=lambda run, _, operands, options: run(*operands, **options),
    )
    monkeypatch.setitem(OPS, "double", record)
    for module in (dispatch, op_module):
        monkeypatch.setattr(module, "BACKENDS", {"new": New(), **BACKENDS})
    assert dispatch.choose("double", ()).implementation == "new"

    @jax.jit
    def run(x):
        return jax.vmap(lambda x: call(record, (x,), {"by": 2.0}, None))(x)

    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "a")
    x = jax.device_put(X[None], jax.sharding.NamedSharding(mesh, spec))
    np.testing.assert_array_equal(run(x), 2 * X[None])
    assert run(x).sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("name", ["blocks", "vectors"])
def test_on_one_device_a_kernel_is_traced_without_its_reference(name, monkeypatch):
    gpus.compile_for_hopper(monkeypatch)
    op, operands, options = CALLS[name]
    quantize = functools.partial(getattr(ops, op), **options)
    program = str(jax.make_jaxpr(quantize)(*operands))
    assert "triton_kernel" in program
    assert "platform_index" not in program


def test_an_op_is_traced_once_in_all_contexts(monkeypatch):
    """Those of visitors make JAX trace layers again."""
    traced, quantize = [], Reference.quantize

    def counted(*operands, **options):
        traced.append(operands)
        return quantize(*operands, **options)

    monkeypatch.setattr(Reference, "quantize", staticmethod(counted))
    x = jnp.ones((1, 31, 29))  # a shape no other test traces
    run = jax.jit(lambda x: ops.quantize(x, SEEDS, **BLOCKS))
    for _ in range(2):
        with visiting(Visitor()):
            run.trace(x)
    assert len(traced) == 1
