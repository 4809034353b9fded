"""The choice of an implementation: by device, by block and on request."""

import functools
import importlib.util
import re
import types

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

pytestmark = pytest.mark.usefixtures("every_cause_warns")
MATMUL = (((1,), (0,)), ((), ()))
BLOCKS = (128, 128, 128)
REFERENCE = "reference", "reference"
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


FIRST, NO_HOPPER = "the first choice", "not mosaic: it needs a Hopper GPU"
OTHER_SIDES = "sides of 128 or 256, not 64"
FLOAT8, GROUPED = {"codes": "float8_e4m3fn"}, {"grouped": True}


@pytest.mark.parametrize(
    ("capability", "sides", "op", "implementation", "backend", "reason", "options"),
    [
        ("9.0", BLOCKS, "matmul", "mosaic", "mosaic", FIRST, {}),
        ("9.0", BLOCKS, "matmul", "mosaic", "mosaic", FIRST, GROUPED),
        ("9.0", BLOCKS, "contract", "mosaic", "mosaic", FIRST, GROUPED),
        ("9.0", (1, 128, 1), "contract", "mosaic", "mosaic", FIRST, GROUPED),
        ("9.0", (32, 32, 32), "contract", "triton", "triton", "not 32", GROUPED),
        ("9.0", (), "matmul", *REFERENCE, "", GROUPED),
        ("9.0", (), "contract", *REFERENCE, "", GROUPED),
        ("9.0", (), "quantize", "mosaic", "triton", FIRST, GROUPED),
        ("8.0", BLOCKS, "contract", "triton", "triton", NO_HOPPER, GROUPED),
        ("9.0", (128, 64, 128), "matmul", "triton", "triton", OTHER_SIDES, {}),
        ("9.0", (64, 64), "quantize", "mosaic", "triton", FIRST, {}),
        ("9.0", (), "quantize", "mosaic", "triton", FIRST, {}),
        ("9.0", (), "matmul", "mosaic", "xla", FIRST, {}),
        ("8.0", (), "quantize", "triton", "triton", NO_HOPPER, {}),
        ("9.0", (1, 128, 128), "matmul", "mosaic", "mosaic", FIRST, {}),
        ("9.0", (1, 64, 1), "matmul", "triton", "triton", OTHER_SIDES, {}),
        ("8.0", (1, 128, 1), "matmul", "triton", "triton", NO_HOPPER, {}),
        ("9.0", (1, 64, 64, 1), "quantize", "mosaic", "triton", FIRST, {}),
        ("8.9", BLOCKS, "matmul", "triton", "triton", NO_HOPPER, {}),
        ("10.0", BLOCKS, "matmul", "triton", "triton", NO_HOPPER, {}),
        ("7.5", BLOCKS, "matmul", *REFERENCE, "compute capability 8.0", {}),
        ("gfx90a", BLOCKS, "matmul", *REFERENCE, "an NVIDIA GPU", {}),
        ("8.0", (7, 100), "quantize", *REFERENCE, "not 7 and 100$", {}),
        ("8.9", (128, 128), "quantize", "triton", "triton", NO_HOPPER, FLOAT8),
        ("9.0", (1, 32, 32, 1), "quantize", "mosaic", "triton", FIRST, FLOAT8),
        ("8.9", (1, 128, 128), "matmul", "triton", "triton", NO_HOPPER, FLOAT8),
        ("9.0", (1, 128, 128), "matmul", "mosaic", "mosaic", FIRST, FLOAT8),
        ("9.0", (1, 64, 64), "matmul", "triton", "triton", OTHER_SIDES, FLOAT8),
        ("8.6", (1, 128, 128), "matmul", *REFERENCE, "triton: FP8 codes need", FLOAT8),
        ("8.0", (1, 128), "quantize", *REFERENCE, "capability 8.9 or above", FLOAT8),
    ],
)
def test_the_choice_depends_on_device_blocks_and_codes(
    on_gpu, capability, sides, op, implementation, backend, reason, options
):
    """``mosaic`` has only the GEMM in Mosaic."""
    on_gpu(capability)
    choice = dispatch.choose_for(Request(op, sides, **options), None)
    assert (choice.implementation, choice.backend) == (implementation, backend)
    assert re.search(reason, choice.reason)


def warn(request, implementation=None):
    """Warns of the choice for a call."""
    choice = dispatch.choose_for(request, implementation)
    dispatch.warn_of_choice(choice, request, implementation)


def test_fp8_codes_without_a_kernel_warn_and_a_requested_kernel_is_an_error(on_gpu):
    on_gpu("8.0")
    layout = Layout("nearest", (1, 32))
    options = {"rowwise": layout, "colwise": None, "dtype": "float8_e4m3fn"}
    quantize = functools.partial(ops.quantize, X, SEEDS, **options)
    match = "^quantize, matmul, .* run as .* slower on this GPU.*: FP8 codes"
    with pytest.warns(UserWarning, match=match):
        codes = jax.eval_shape(lambda: quantize().rowwise)
    with pytest.raises(ValueError, match=r"=triton cannot do quantize: .*FP8 cod"):
        jax.eval_shape(lambda: quantize(implementation="triton"))
    multiply = functools.partial(ops.matmul, dtype=jnp.float32, implementation="triton")
    with pytest.raises(ValueError, match="=triton cannot do matmul: FP8 codes need a"):
        jax.eval_shape(lambda codes: multiply(codes, codes), codes)


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        (
            "TPU v5 lite",
            Request("quantize", (128, 128), **FLOAT8),
            r"^quantize, matmul.* run as .*: not tpu: it has no kernel for FP8 codes$",
        ),
        ("TPU v6 lite", Request("matmul", (128,) * 3), r"replace\(recipe, block=256\)"),
        ("TPU v6 lite", Request("matmul", (256,) * 3), None),
        ("TPU v5 lite", Request("matmul", (128,) * 3), None),
    ],
)
def test_what_does_not_suit_a_tpu_warns_once(monkeypatch, kind, request_, message):
    """FP8 codes, which name no op without them, and small blocks."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    if message is not None:
        with pytest.warns(UserWarning, match=message):
            warn(request_)
    warn(request_)


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


@pytest.mark.parametrize(
    ("sides", "width", "most_rows", "why"),
    [
        ((64, 128), 256, 256, None),
        ((64, 128), 256, 128, None),
        ((64, 128), 200, 256, "rows of 200"),
        ((64, 64), 256, 256, "64 w"),
        # The gradient of a gate takes blocks of fewer rows than a norm or a gate.
        ((256, 128), 256, 256, None),
        ((256, 128), 256, 128, "up to 128 .* 256 rows"),
    ],
)
def test_two_passes_warn_once_unless_they_were_asked_for(
    on_gpu, sides, width, most_rows, why
):
    on_gpu("9.0")
    request = Request("quantize", sides, packs=(width, most_rows))
    for name in ("triton", "reference"):
        warn(request, name)
    choice = dispatch.choose_for(request, None)
    assert choice.implementation == "mosaic"
    if why is None:
        assert choice.reason == "the first choice on this device"
        assert dispatch.choose("quantize", sides, width=width) == choice
        warn(request)
        return
    assert re.search(f"not in one pass, .*{why}", choice.reason)
    text = f"^mlp: quantize takes more time; .* {why}"
    with pytest.warns(UserWarning, match=text), layer_name("mlp"):
        warn(request)
    warn(request)


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
