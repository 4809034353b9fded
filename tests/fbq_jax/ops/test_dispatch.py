"""The choice of an implementation: by device, by block and on request."""

import functools
import importlib.util
import re
import types
import warnings

import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    FallbackDot,
    GatedMLP,
    LlmInt8Dot,
    RulesDot,
    dot_general,
    nnx,
    ops,
    recipes,
)
from fbq_jax.kernels.quantized import Layout
from fbq_jax.ops import backends, dispatch
from fbq_jax.ops.dispatch import Request
from fbq_jax.sharding import layer_names
from fbq_jax.sharding.layer_names import layer_name

MATMUL = (((1,), (0,)), ((), ()))
BLOCKS = (128, 128, 128)
X, SEEDS = jnp.ones((1, 4, 4)), jnp.zeros(1, jnp.uint32)
IN_BLOCKS = {"rowwise": Layout("nearest", (32, 32)), "colwise": None}


@pytest.fixture
def on_gpu(monkeypatch):
    """Chooses as on a machine with some GPU, with Triton or without it."""

    def pretend(capability, *, triton=True):
        monkeypatch.setattr(jax, "__version_info__", backends.MOSAIC_JAX)
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [device])
        found = object() if triton else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)

    return pretend


def test_without_a_gpu_the_reference_runs_and_the_reason_says_why():
    choice = dispatch.choose("matmul", BLOCKS)
    assert choice.implementation == "reference"
    assert "not mosaic: it needs a GPU, and JAX's default backend is cpu" in (
        choice.reason
    )


FLOAT8 = {"codes": "float8_e4m3fn"}
# Capability, sides, op, implementation and reason.
CHOICES = [
    ("9.0", BLOCKS, "matmul", "mosaic", "the first choice"),
    ("9.0", (128, 64, 128), "matmul", "triton", "sides of 128 or 256, not 64"),
    ("9.0", (64, 64), "quantize", "mosaic", "the first choice"),
    ("9.0", (), "matmul", "mosaic", "the first choice"),
    ("8.0", (), "quantize", "triton", "not mosaic: it needs a Hopper GPU"),
    ("9.0", (1, 128, 128), "matmul", "mosaic", "the first choice"),
    ("9.0", (1, 64, 1), "matmul", "triton", "sides of 128 or 256, not 64"),
    ("8.0", (1, 128, 1), "matmul", "triton", "not mosaic: it needs a Hopper GPU"),
    ("9.0", (1, 64, 64, 1), "quantize", "mosaic", "the first choice"),
    ("8.9", BLOCKS, "matmul", "triton", "not mosaic: it needs a Hopper GPU"),
    ("10.0", BLOCKS, "matmul", "triton", "not mosaic: it needs a Hopper GPU"),
    ("7.5", BLOCKS, "matmul", "reference", "compute capability 8.0"),
    ("gfx90a", BLOCKS, "matmul", "reference", "an NVIDIA GPU"),
    ("8.0", (7, 100), "quantize", "reference", "not 7 and 100$"),
]
FLOAT8_CHOICES = [
    ("8.9", (128, 128), "quantize", "triton", "not mosaic: it needs a Hopper GPU"),
    ("9.0", (1, 32, 32, 1), "quantize", "mosaic", "the first choice"),
    ("8.9", (1, 128, 128), "matmul", "triton", "not mosaic: it needs a Hopper GPU"),
    ("9.0", (1, 128, 128), "matmul", "mosaic", "the first choice"),
    ("9.0", (1, 64, 64), "matmul", "triton", "sides of 128 or 256, not 64"),
    ("8.6", (1, 128, 128), "matmul", "reference", "not triton: FP8 codes need a G"),
    ("8.0", (1, 128), "quantize", "reference", "capability 8.9 or above"),
]


@pytest.mark.parametrize(
    ("capability", "sides", "op", "implementation", "reason", "options"),
    [
        *[(*row, {}) for row in CHOICES],
        *[(*row, FLOAT8) for row in FLOAT8_CHOICES],
    ],
)
def test_the_choice_depends_on_device_blocks_and_codes(
    on_gpu, capability, sides, op, implementation, reason, options
):
    on_gpu(capability)
    choice = dispatch.choose(op, sides, **options)
    assert choice.implementation == implementation
    assert re.search(reason, choice.reason)


def warn(request, implementation=None):
    """Warns of the choice for a call."""
    choice = dispatch.choose_for(request, implementation)
    dispatch.warn_of_choice(choice, request, implementation)


def test_fp8_codes_without_a_kernel_warn_and_a_requested_kernel_is_an_error(on_gpu):
    on_gpu("8.0")
    layer_names.clear()
    quantize = functools.partial(
        ops.quantize,
        X,
        SEEDS,
        rowwise=Layout("nearest", (1, 32)),
        colwise=None,
        dtype="float8_e4m3fn",
    )
    match = "^quantize, matmul, .* run as .* slower on this GPU.*: FP8 codes"
    with pytest.warns(UserWarning, match=match):
        codes = jax.eval_shape(lambda: quantize().rowwise)
    with pytest.raises(ValueError, match=r"=triton cannot do quantize: .*FP8 cod"):
        jax.eval_shape(lambda: quantize(implementation="triton"))
    multiply = functools.partial(ops.matmul, dtype=jnp.float32, implementation="triton")
    with pytest.raises(ValueError, match="=triton cannot do matmul: FP8 codes need a"):
        jax.eval_shape(lambda codes: multiply(codes, codes), codes)


def test_fp8_codes_on_a_tpu_warn_and_name_no_op_without_them(monkeypatch):
    monkeypatch.setattr(layer_names, "_warned", {})
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    match = r"^quantize, matmul.* run as .*: not tpu: it has no kernel for FP8 codes$"
    with pytest.warns(UserWarning, match=match):
        warn(Request("quantize", (128, 128), **FLOAT8))


def test_an_old_jax_multiplies_by_triton_and_the_reason_says_why(on_gpu, monkeypatch):
    on_gpu("9.0")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    choice = dispatch.choose("matmul", BLOCKS)
    assert choice.implementation == "triton"
    assert "not mosaic: it needs jax 0.10.2 or later" in choice.reason
    assert dispatch.choose("quantize", (128, 128)).implementation == "triton"


def test_without_triton_the_reason_says_what_to_install(on_gpu):
    on_gpu("9.0", triton=False)
    assert "pip install 'fbq-jax[cuda]'" in dispatch.choose("matmul", BLOCKS).reason
    with pytest.raises(ValueError, match=r"cannot do quantize: .*pip install 'fbq-jax"):
        dispatch.choose("quantize", (128, 128), implementation="triton")


def test_one_reason_for_the_slow_reference_gives_one_warning(on_gpu):
    """It names the layer and every op that the reason applies to."""
    on_gpu("7.5")
    layer_names.clear()
    every = "encoder/up: quantize, matmul, contract, move_threshold"
    with (
        layer_name("encoder/up"),
        pytest.warns(UserWarning, match=f"{every} run as jax.numpy code") as caught,
    ):
        jax.eval_shape(lambda: ops.quantize(X, SEEDS, **IN_BLOCKS))
    assert "many times slower on this GPU than a kernel: not mosaic" in str(
        caught[0].message
    )
    with layer_name("encoder/down"):
        jax.eval_shape(lambda: ops.quantize(X, SEEDS, **IN_BLOCKS))
        fallback = IN_BLOCKS | {"theta": jnp.zeros(1), "criterion": "absmax"}
        jax.eval_shape(lambda: ops.quantize(X, SEEDS, **fallback))
        layer_names.clear()
        asked = {"implementation": "reference"} | IN_BLOCKS
        jax.eval_shape(lambda: ops.quantize(X, SEEDS, **asked))


def test_a_kernel_needs_numbers_and_the_error_names_the_symbolic_size(on_gpu):
    on_gpu("8.0")
    (rows,) = export.symbolic_shape("128*b")
    x = jax.ShapeDtypeStruct((1, rows, 128), jnp.float32)
    with pytest.raises(ValueError, match=r"quantize: the size 128\*b is symbolic, .*'"):
        jax.eval_shape(lambda x: ops.quantize(x, SEEDS, **IN_BLOCKS), x)
    asked = {"implementation": "reference"} | IN_BLOCKS
    jax.eval_shape(lambda x: ops.quantize(x, SEEDS, **asked), x)


def test_a_kernel_needs_a_shard_map_that_does_not_check_axes(on_gpu):
    on_gpu("8.0")
    x = jnp.ones((1, 64, 128))
    mesh = jax.sharding.AbstractMesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(None, "data"), P()), "out_specs": P(None, "data")}

    def trace(*, check_vma, **asked):
        run = functools.partial(ops.quantize, **IN_BLOCKS, **asked)
        mapped = jax.shard_map(run, mesh=mesh, check_vma=check_vma, **specs)
        jax.eval_shape(mapped, x, SEEDS)

    with pytest.raises(ValueError, match=r"over data, a triton kernel needs check_vma"):
        trace(check_vma=True)
    trace(check_vma=False)
    trace(check_vma=True, implementation="reference")


def test_errors_name_who_asked_for_an_implementation(monkeypatch):
    x = jnp.ones((4, 4))
    monkeypatch.setenv("FBQ_IMPLEMENTATION", "reference")
    assert "FBQ_IMPLEMENTATION= asks for it" in dispatch.choose("matmul", BLOCKS).reason
    with pytest.raises(ValueError, match=r"implementation=mosaic cannot do .* a GPU"):
        dot_general(x, x, MATMUL, implementation="mosaic")
    with pytest.raises(ValueError, match=r"implementation=triton cannot do .* a GPU"):
        FallbackDot(implementation="triton")(x, x, MATMUL)
    monkeypatch.setenv("FBQ_IMPLEMENTATION", "cublas")
    with pytest.raises(
        ValueError, match=r"='cublas' is not .*: mosaic, triton, tpu, refer"
    ):
        dot_general(x, x, MATMUL)


@pytest.mark.parametrize(
    "make",
    [
        FallbackDot,
        LlmInt8Dot,
        nnx.FallbackDot,
        functools.partial(RulesDot, {}),
        functools.partial(nnx.quantize, flax.nnx.Module(), {}),
    ],
)
def test_a_wrong_name_is_an_error_before_the_first_call(make):
    message = "implementation='tritn' is not .*: mosaic, triton, tpu, reference"
    with pytest.raises(ValueError, match=message):
        make(implementation="tritn")


def test_an_unknown_op_is_named():
    with pytest.raises(ValueError, match=r"'matmull' is not an op; .*matmul"):
        dispatch.choose("matmull", BLOCKS)


def test_a_choice_names_the_backend_that_computes_the_op(on_gpu):
    """The implementation ``mosaic`` has only the GEMM in Mosaic."""
    on_gpu("9.0")

    def backend(op, sides, implementation=None):
        return dispatch.choose(op, sides, implementation=implementation).backend

    assert backend("matmul", BLOCKS) == "mosaic"
    assert backend("matmul", BLOCKS, "triton") == "triton"
    assert backend("matmul", ()) == "xla"
    assert backend("quantize", (128, 128)) == "triton"
    assert backend("quantize", ()) == "triton"
    assert backend("contract", BLOCKS) == "mosaic"


@pytest.mark.parametrize("most_rows", [256, 128])
def test_a_reason_says_where_one_pass_becomes_two(on_gpu, most_rows):
    """The gradient of a gate takes blocks of fewer rows than a norm or a gate."""
    on_gpu("9.0")

    def choose(sides, width):
        request = Request("quantize", sides, packs=(width, most_rows))
        return dispatch.choose_for(request, None)

    first = "the first choice on this device"
    assert choose((64, 128), 256).reason == first
    assert dispatch.choose("quantize", (64, 128), width=256).reason == first
    two_passes = [((64, 128), 200, "rows of 200"), ((64, 64), 256, "64 w")]
    if most_rows == 128:
        two_passes.append(((256, 128), 256, "up to 128 .* 256 rows"))
    for sides, width, why in two_passes:
        choice = choose(sides, width)
        assert choice.implementation == "mosaic"
        assert re.search(f"not in one pass, .*{why}", choice.reason)


def test_two_passes_warn_once_unless_they_were_asked_for(monkeypatch, on_gpu):
    monkeypatch.setattr(layer_names, "_warned", {})
    on_gpu("9.0")

    def request(width):
        return Request("quantize", (64, 128), packs=(width, 256))

    warn(request(256))
    for name in ("triton", "reference"):
        warn(request(200), name)
    text = r"^mlp: quantize takes more time; .* rows of 200"
    with pytest.warns(UserWarning, match=text), layer_name("mlp"):
        warn(request(200))
    warn(request(200))


@pytest.mark.parametrize("name", ["fallback", "row_block_lhs"])
def test_the_width_is_that_of_a_norm_or_of_a_gate(monkeypatch, name):
    packs = set()

    def record(_choice, request, _implementation):
        packs.add(request.packs)

    monkeypatch.setattr(dispatch, "warn_of_choice", record)
    model = GatedMLP(96, dot_general=FallbackDot(recipes.NAMED[name]))
    x = jnp.ones((4, 72))
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), x))
    params = variables.pop("params")

    def loss(params, state):
        return model.apply({"params": params, **state}, x, mutable=[*state])[0].sum()

    jax.eval_shape(jax.grad(loss), params, variables)
    assert packs == {None, (72, 256), (96, 256), (96, 128)}


@pytest.mark.parametrize(
    ("kind", "side", "warns"),
    [
        ("TPU v6 lite", 128, True),
        ("TPU v6 lite", 256, False),
        ("TPU v5 lite", 128, False),
    ],
)
def test_blocks_that_do_not_suit_a_tpu_warn_once(monkeypatch, kind, side, warns):
    monkeypatch.setattr(layer_names, "_warned", {})
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    request = Request("matmul", (side,) * 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn(request)
    assert len(caught) == warns
    assert all("replace(recipe, block=256)" in str(w.message) for w in caught)
