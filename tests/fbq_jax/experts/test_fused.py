"""Fused experts against their projections and the gate in sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax import FallbackDot, MoEMLP, Routing, recipes, save_codes
from fbq_jax.experts import mlp
from fbq_jax.kernels.layer_sources import Gate, GateGrad
from fbq_jax.ops.op import LocalOp
from tests import oracle
from tests.gpus import compile_for_hopper, h200s, needs_compiler
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast

E, D, F = 5, 40, 48
X, DY = heavy((70, D)), heavy((70, D), 1)
FALLBACK = dataclasses.replace(recipes.fallback, block=32)
BLOCK, ROW_BLOCK, FP8_ROW_BLOCK = (
    dataclasses.replace(recipe, block=(32, 128, 64))
    for recipe in (recipes.block, recipes.row_block_lhs, recipes.fp8_row_block_lhs)
)
LAYER = MoEMLP(Routing(E), F, dot_general=FallbackDot(FALLBACK))
MUTABLE = ["fallback", "expert_stats", "intermediates"]


@pytest.fixture
def unfused(monkeypatch):
    """Computes a function without fused experts."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(mlp, "can_fuse", lambda *_: False)
            return function(*args)

    return call


def variables_of(layer):
    return jax.jit(layer.init)(jax.random.key(0), X.astype(layer.dtype or X.dtype))


def loss(layer, params, x, state):
    """The output's product with a constant; the output, and the next state."""
    y, updates = layer.apply({"params": params, **state}, x, mutable=MUTABLE)
    return jnp.vdot(DY.astype(y.dtype), y), (y, updates)


def trainer(layer):
    """A function of variables that takes a training step, compiled once.

    It returns gradients, the output, and the next state.
    """
    step = jax.jit(jax.grad(functools.partial(loss, layer), (0, 1), has_aux=True))

    def run(variables):
        state = dict(variables)
        return step(state.pop("params"), X, state)

    return run


@pytest.mark.parametrize(
    ("recipe", "hidden", "routing"),
    rows_with_first_fast(
        [
            (FALLBACK, F, {}),
            (ROW_BLOCK, 256, {}),
            (BLOCK, 256, {}),
            (FP8_ROW_BLOCK, 256, {}),
            (dataclasses.replace(recipes.jetfire, block=32), F, {"top_k": 3}),
            (FALLBACK, F, {"capacity_factor": 0.7}),
        ],
        2,
    ),
)
def test_a_step_has_the_bits_of_the_layers_in_sequence(
    unfused, recipe, hidden, routing
):
    """In float32: outputs, gradients, states and each expert's rate."""
    layer = dataclasses.replace(
        LAYER,
        routing=Routing(E, **routing),
        hidden=hidden,
        dot_general=FallbackDot(recipe),
    )
    variables = variables_of(layer)
    fused, in_sequence = trainer(layer), trainer(layer)
    for _ in range(2):
        got = fused(variables)
        want = unfused(in_sequence, variables)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        _, (_, updates) = got
        variables = {**variables, "fallback": updates["fallback"]}
    if recipe.criterion is not None:
        for name in ("gate_up", "down"):
            (rates,) = updates["intermediates"][name]["fallback_rates"]
            assert np.any(rates)


@pytest.mark.parametrize(
    ("recipe", "bits"),
    rows_with_first_fast(
        [(FALLBACK, 10), (ROW_BLOCK, 10), (FP8_ROW_BLOCK, 10), (FALLBACK, None)], 2
    ),
)
def test_the_hidden_activation_is_quantized_by_fused_ops(monkeypatch, recipe, bits):
    sources, run = set(), LocalOp.__call__

    def recorded(self, source, *operands, **options):
        sources.add(type(source))
        return run(self, source, *operands, **options)

    monkeypatch.setattr(LocalOp, "__call__", recorded)
    dot = FallbackDot(recipe)
    layer = dataclasses.replace(LAYER, bits=bits, dot_general=dot)
    x = jax.ShapeDtypeStruct((300, D), jnp.float32)  # a shape no other test traces
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    params = variables.pop("params")

    def saved(params, x, variables):
        def forward(params, x):
            return layer.apply({"params": params, **variables}, x, mutable=MUTABLE)

        _, vjp, _ = jax.vjp(forward, params, x, has_aux=True)
        vjp(x)
        return vjp

    floats = [
        leaf.shape[-1]
        for leaf in jax.tree.leaves(jax.eval_shape(saved, params, x, variables))
        if leaf.dtype == jnp.float32
    ]
    assert ({Gate, GateGrad} <= sources) == (bits is not None)
    assert (F in floats) == (bits is None)


def test_a_gate_of_two_bytes_is_rounded_once(unfused):
    layer = dataclasses.replace(LAYER, dtype=jnp.bfloat16)
    variables = variables_of(layer)
    (got, _), (y, _) = trainer(layer)(variables)
    (want, _), (unfused_y, _) = unfused(trainer(layer), variables)
    assert np.any(y != unfused_y)
    assert oracle.relative(y, unfused_y) < 0.01
    assert max(jax.tree.leaves(jax.tree.map(oracle.relative, got, want))) < 0.02


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["row_block_lhs", "block"])
def test_a_layer_more_takes_the_memory_of_its_codes(monkeypatch, name):
    """Of scanned and rematerialized layers, compiled for an H200, in a training step.

    Beside codes and packed values, each saves scales and its input.
    """
    compile_for_hopper(monkeypatch)
    sharding = NamedSharding(h200s(1, "all"), PartitionSpec())
    layer = MoEMLP(
        Routing(16, top_k=8),
        256,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        dot_general=FallbackDot(recipes.NAMED[name]),
    )

    def step(length):
        """The loss of a stack, what it is differentiated by, and the state."""

        def layers(layer, x):
            block = nn.remat(lambda m, x: (x + m(x), None), policy=save_codes)
            axes = dict.fromkeys(("params", *MUTABLE), 0)
            scan = nn.scan(block, axes, split_rngs={"params": True}, length=length)
            return scan(layer, x)[0]

        def loss(given, state):
            params, x = given
            y, updates = nn.apply(layers, layer, MUTABLE)({**params, **state}, x)
            return jnp.sum(y.astype(jnp.float32)), updates

        x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
        state = dict(jax.eval_shape(nn.init(layers, layer), jax.random.key(0), x))
        params = {"params": state.pop("params")}
        return loss, (params, x), state

    def temporary_bytes(length):
        loss, *args = step(length)
        placed = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args
        )
        compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(*placed).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def residuals(given, state):
        return jax.vjp(lambda given: loss(given, state), given, has_aux=True)[1]

    loss, *args = step(4)
    saved = jax.tree.leaves(jax.eval_shape(residuals, *args))
    # Codes, and packed values in words.
    dtypes = jnp.int8, jnp.float8_e4m3fn, jnp.int32, jnp.uint32
    arrays = [x for x in saved if x.dtype in dtypes and x.ndim > 2]
    codes = sum(x.size * x.dtype.itemsize for x in arrays)
    more = temporary_bytes(8) - temporary_bytes(4)
    assert codes < more <= 1.1 * codes


def test_methods_that_capture_outputs():
    variables = variables_of(LAYER)
    apply = functools.partial(LAYER.apply, mutable=MUTABLE, capture_intermediates=True)
    y, updates = jax.jit(apply)(variables, X)
    np.testing.assert_array_equal(updates["intermediates"]["__call__"][0], y)
    assert "gate_up" in LAYER.tabulate(jax.random.key(0), X)


@pytest.mark.parametrize("bits", [3, 10.0])
def test_bits_out_of_range(bits):
    layer = dataclasses.replace(LAYER, bits=bits)
    with pytest.raises(ValueError, match="bits must be an integer from 4 to 12"):
        jax.eval_shape(layer.init, jax.random.key(0), X)
