"""A training step runs on the device: the host decides nothing in it."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    FallbackDot,
    GatedMLP,
    MoEMLP,
    NormDense,
    Routing,
    fallback_dot,
    fp8_dot,
    recipes,
)
from fbq_jax.bench import measure
from fbq_jax.kernels.mosaic import gemm
from fbq_jax.ops import dispatch
from tests.gpus import compile_for_hopper, h200s, needs_compiler
from tests.marks import rows_with_first_fast, with_first_fast


def dense(dot_general):
    return nn.Dense(128, dtype=jnp.bfloat16, dot_general=dot_general)


def experts(dot_general):
    routing = Routing(num_experts=4)
    return MoEMLP(routing, 128, dtype=jnp.bfloat16, dot_general=dot_general)


MODULES = {
    "dense": dense(fallback_dot),
    "rowwise backward": dense(FallbackDot(recipes.fallback_rowwise_bwd)),
    "block": dense(FallbackDot(recipes.block)),
    "norm and dense": NormDense(128),
    "gated MLP": GatedMLP(128),
    "fp8": dense(fp8_dot),
    "experts": experts(fallback_dot),
}


OVERWRITE = "_overwrite_with_gradient"  # its gradient is its new value


def step_of(module):
    """The gradient and the state update of a module."""

    def step(variables, x):
        rest = dict(variables)
        given = {n: rest.pop(n) for n in ("params", OVERWRITE) if n in rest}

        def loss(given):
            out = module.apply({**given, **rest}, x, mutable=list(rest))
            return jnp.sum(jnp.square(out[0].astype(jnp.float32))), out[1]

        return jax.grad(loss, has_aux=True)(given)

    return step


def compiled_step(module, x):
    """The compiled step of a module, and its variables."""
    variables = module.init(jax.random.key(0), x)
    return jax.jit(step_of(module)).lower(variables, x).compile(), variables


# The reference of experts has conditionals, so only their kernels are without.
@pytest.mark.parametrize(
    "name", with_first_fast(name for name in MODULES if name != "experts")
)
def test_a_step_has_no_conditional(name):
    x = jnp.ones((256, 256), jnp.bfloat16)
    step, _ = compiled_step(MODULES[name], x)
    assert " conditional(" not in step.as_text()


@pytest.fixture
def triton_calls(monkeypatch):
    compile_for_hopper(monkeypatch)


def compile_for_h200(step, module, x_shape, options=None):
    """The HLO of a step ``(variables, x)`` that donates the variables."""
    sharding = NamedSharding(h200s(1, "all"), P())
    x = jax.ShapeDtypeStruct(x_shape, jnp.bfloat16, sharding=sharding)
    row = jax.ShapeDtypeStruct((1, x_shape[-1]), jnp.bfloat16)
    variables = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        jax.eval_shape(module.init, jax.random.key(0), row),
    )
    lowered = jax.jit(step, donate_argnums=0).lower(variables, x)
    return lowered.compile(compiler_options=options).as_text()


def triton_kernels(text):
    """The number of Triton kernels; there are no calls that XLA cannot look into."""
    targets = re.findall('custom_call_target="(.*?)"', text)
    assert set(targets) <= {"triton_kernel_call_ffi"}
    return len(targets)


@needs_compiler
@pytest.mark.usefixtures("triton_calls")
@pytest.mark.parametrize(
    "name",
    with_first_fast(
        ["norm and dense", "dense", "rowwise backward", "block", "gated MLP"]
    ),
)
def test_a_step_on_a_gpu_writes_state_in_place(name):
    """XLA launches each kernel by itself, and copies nothing of the state."""
    module = MODULES[name]
    text = compile_for_h200(step_of(module), module, (256, 256))
    assert triton_kernels(text) >= 5
    assert not re.findall(r"\[\]\S* copy\(", text)
    assert " while(" not in text


@needs_compiler
@pytest.mark.usefixtures("triton_calls")
@pytest.mark.parametrize(
    ("name", "backend"),
    rows_with_first_fast(itertools.product(MODULES, ("mosaic", "triton"))),
)
def test_a_step_on_a_gpu_is_one_cuda_graph(name, backend, monkeypatch, tmp_path):
    """XLA's list of what the host starts has one entry, with all kernels inside."""
    monkeypatch.setattr(gemm, "_num_sms", lambda: 132)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, backend)
    module = MODULES[name]
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    text = compile_for_h200(step_of(module), module, (256, 256), dump)
    assert " conditional(" not in text
    assert " while(" not in text
    (file,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    entries = file.read_text()
    assert re.findall(r"^\d+: (\w+)", entries, re.MULTILINE) == ["kCommandBuffer"]
    assert "kCustomCall " in entries or name == "fp8"  # whose products are XLA's


@needs_compiler
@pytest.mark.usefixtures("triton_calls")
def test_unrolled_microbatches_quantize_a_weight_once():
    module, microbatches = MODULES["dense"], 3

    def step(variables, x):
        grads = jax.tree.map(jnp.zeros_like, variables["params"])
        for microbatch in x:
            new, state = step_of(module)(variables, microbatch)
            grads = jax.tree.map(jnp.add, grads, new["params"])
            variables = {**variables, **state}
        return grads, variables

    text = compile_for_h200(step, module, (microbatches, 256, 256))
    # X, the threshold, the steps, dY and two products; and W.
    assert triton_kernels(text) == 6 * microbatches + 1


@needs_compiler
@pytest.mark.usefixtures("triton_calls")
@pytest.mark.parametrize(
    ("dot_general", "most"),
    rows_with_first_fast([(fallback_dot, 10), (FallbackDot(recipes.block), 9)]),
)
def test_each_layer_adds_few_launches(dot_general, most):
    """Three products, what they need, the cast of W and its update."""

    def launches(depth):
        layer = functools.partial(nn.Dense, 256, use_bias=False, dtype=jnp.bfloat16)
        module = nn.Sequential([layer(dot_general=dot_general) for _ in range(depth)])

        def step(variables, x):
            grads, state = step_of(module)(variables, x)
            params = variables["params"], grads["params"]
            return {**state, "params": jax.tree.map(lambda w, g: w - g, *params)}

        text = compile_for_h200(step, module, (256, 256))
        main = text[text.index("\nENTRY") :]
        return len(re.findall(r" (?:fusion|custom-call|copy)\(", main))

    assert launches(3) - launches(2) <= most


@needs_compiler
@pytest.mark.usefixtures("triton_calls")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["row_block_lhs", "fp8_row_block_lhs"])
def test_experts_with_scales_of_rows_launch_what_blocks_do(name, monkeypatch):
    """The same kernels, and not more of XLA's own."""
    monkeypatch.setattr(gemm, "_num_sms", lambda: 132)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "mosaic")

    def launches(recipe):
        module = experts(FallbackDot(recipe))
        text = compile_for_h200(step_of(module), module, (256, 256))
        main = text[text.index("\nENTRY") :]
        kernels = re.findall(r'custom_call_target="(\w+)"', main)
        return sorted(kernels), len(re.findall(r" (?:fusion|copy)\(", main))

    (kernels, others), blocks = map(launches, (recipes.NAMED[name], recipes.block))
    assert kernels == blocks[0]
    assert kernels.count("mosaic_gpu_v2") == 5  # x needs no gradient
    assert others <= blocks[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dense", "block"])
def test_a_layer_takes_few_launches(name):
    """Three GEMMs, three quantizations, step lists and the state; and XLA's own."""
    x = jnp.ones((2048, 1024), jnp.bfloat16)
    module = MODULES[name].clone(features=1024, use_bias=False)
    step, variables = compiled_step(module, x)
    text = step.as_text()
    assert " conditional(" not in text
    assert " while(" not in text
    kernels = [kernel for kernel, _ in measure.kernels(step, variables, x)]
    assert len(kernels) <= {"dense": 13, "block": 12}[name], kernels
