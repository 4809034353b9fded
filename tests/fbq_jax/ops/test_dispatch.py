"""The choice of an implementation, and the library's seams."""

import functools
import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import FallbackDot, dot_general, ops, recipes
from fbq_jax.kernels import reference
from fbq_jax.ops import dispatch

MATMUL = (((1,), (0,)), ((), ()))
BLOCKS = (128, 128, 128)
SEEDS = jnp.zeros(1, jnp.uint32)


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes the choice as on a machine with some GPU, and with jax-triton or not."""

    def pretend(capability, *, triton=True):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [device])
        found = object() if triton else None
        monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: found)

    return pretend


def test_without_a_gpu_it_is_the_reference_and_says_why():
    choice = dispatch.choose("matmul", BLOCKS)
    assert choice.implementation == "reference"
    assert "not mosaic: it needs a GPU, and JAX's default backend is cpu" in (
        choice.reason
    )


@pytest.mark.parametrize(
    ("capability", "sides", "op", "implementation", "reason"),
    [
        ("9.0", BLOCKS, "matmul", "mosaic", "the first choice"),
        ("9.0", (128, 64, 128), "matmul", "triton", "sides of 128 or 256"),
        ("9.0", (64, 64), "quantize", "mosaic", "the first choice"),
        ("9.0", (), "matmul", "mosaic", "the first choice"),
        ("8.0", (), "quantize_vectors", "mosaic", "the first choice"),
        ("8.0", (1, 64), "quantize", "reference", r"not \(1, 64\)"),
        ("9.0", (1, 64, 1), "matmul", "reference", r"not \(1, 64, 1\)"),
        ("8.9", BLOCKS, "matmul", "triton", "not mosaic: it needs a Hopper GPU"),
        ("10.0", BLOCKS, "matmul", "triton", "not mosaic: it needs a Hopper GPU"),
        ("7.5", BLOCKS, "matmul", "reference", "compute capability 8.0"),
        ("gfx90a", BLOCKS, "matmul", "reference", "an NVIDIA GPU"),
        ("8.0", (128, 100), "quantize", "reference", r"not \(128, 100\)"),
    ],
)
def test_by_device_and_blocks(on_gpu, capability, sides, op, implementation, reason):
    on_gpu(capability)
    choice = dispatch.choose(op, sides)
    assert choice.implementation == implementation
    assert re.search(reason, choice.reason)


def test_without_jax_triton_it_says_what_to_install(on_gpu):
    on_gpu("9.0", triton=False)
    assert "pip install 'fbq-jax[cuda]'" in dispatch.choose("matmul", BLOCKS).reason
    with pytest.raises(ValueError, match=r"cannot do quantize: .*pip install 'fbq-jax"):
        dispatch.choose("quantize", (128, 128), implementation="triton")


def test_a_gpu_that_runs_the_reference_warns_once(on_gpu):
    on_gpu("7.5")
    dispatch.warn_of_reference.cache_clear()
    x, seeds = jnp.ones((1, 4, 4)), jnp.zeros(1, jnp.uint32)
    asked = {"block": (32, 32), "rowwise": "nearest", "colwise": None}
    with pytest.warns(UserWarning, match="many times slower than by a kernel: not mos"):
        ops.quantize(x, seeds, **asked)
    with warnings.catch_warnings():
        ops.quantize(x, seeds, **asked)
        dispatch.warn_of_reference.cache_clear()
        ops.quantize(x, seeds, **asked, implementation="reference")


def test_what_is_asked_for_is_named_in_errors(monkeypatch):
    x = jnp.ones((4, 4))
    monkeypatch.setenv("FBQ_IMPLEMENTATION", "reference")
    assert "FBQ_IMPLEMENTATION= asks for it" in dispatch.choose("matmul", BLOCKS).reason
    with pytest.raises(ValueError, match=r"implementation=mosaic cannot do .* a GPU"):
        dot_general(x, x, MATMUL, implementation="mosaic")
    with pytest.raises(ValueError, match=r"implementation=triton cannot do .* a GPU"):
        FallbackDot(implementation="triton")(x, x, MATMUL)
    monkeypatch.setenv("FBQ_IMPLEMENTATION", "cublas")
    with pytest.raises(ValueError, match=r"='cublas' is not .*: mosaic, triton, refer"):
        dot_general(x, x, MATMUL)


def test_an_unknown_op_is_named():
    with pytest.raises(
        ValueError, match="'matmull' is not an op; there are: quantize,"
    ):
        dispatch.choose("matmull", BLOCKS)


@pytest.mark.parametrize(
    ("reduce", "seeds"), [("int8", None), (None, SEEDS), ("float32", SEEDS)]
)
def test_seeds_are_for_sums_in_int8(reduce, seeds):
    x = reference.Quantized(jnp.ones((1, 4, 4), jnp.int8), jnp.ones((1, 1, 1)))
    options = {"block_shape": BLOCKS, "dtype": jnp.float32}
    with pytest.raises(ValueError, match=f"reduce={reduce!r} with(out)? seeds"):
        ops.matmul(x, None, x, reduce=reduce, seeds=seeds, **options)


def test_every_op_goes_through_the_choice(monkeypatch):
    calls = []

    def function(choice, sides):
        calls.append((choice.op, len(sides)))
        return getattr(reference, choice.op)

    monkeypatch.setattr(dispatch, "function_of", function)
    ops._batched_op.cache_clear()
    x = jnp.ones((4, 4))
    for recipe in (recipes.fallback, recipes.fallback_rowwise_bwd):
        dot = functools.partial(dot_general, recipe=recipe)
        jax.grad(lambda x, dot=dot: dot(x, x, MATMUL)[0].sum())(x)
    assert set(calls) == {
        ("block_metric", 2),
        ("quantize", 2),
        ("quantize_vectors", 0),
        ("quantize_fallback", 2),
        ("matmul", 3),
        ("matmul", 0),
    }


@pytest.mark.parametrize("op", dispatch.FUSED_OPS)
def test_a_reason_says_where_one_pass_becomes_two(on_gpu, op):
    on_gpu("9.0")
    assert dispatch.choose(op, (64, 128), width=256).reason == (
        "the first choice on this GPU"
    )
    for sides, width, why in [((64, 128), 200, "rows of 200"), ((64, 64), 256, "64 w")]:
        choice = dispatch.choose(op, sides, width=width)
        assert choice.implementation == "mosaic"
        assert re.search(f"not in one pass, .*{why}", choice.reason)


def test_vmap_of_a_producer_stacks_its_matrices():
    keys = jax.random.split(jax.random.key(0), 3)
    x, gain = (jax.random.normal(k, (3, 1, 40, 160)) for k in keys[:2])
    theta, seeds = jnp.zeros((3, 1)), jnp.zeros(1, jnp.uint32)
    op = functools.partial(
        ops.rms_norm_quantize,
        epsilon=1e-5,
        bits=10,
        block=(32, 128),
        criterion="absmax",
        colwise=None,
    )
    got = jax.vmap(op, (0, 0, 0, None))(x, gain[:, :, 0], theta, seeds)
    for i in range(3):
        want = op(x[i], gain[i, :, 0], theta[i], seeds)
        one = jax.tree.map(lambda a, i=i: a[i], got)
        jax.tree.map(np.testing.assert_array_equal, one, want)
