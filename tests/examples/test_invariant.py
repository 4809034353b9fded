"""The invariant Llama: a token's bits depend on its sequence alone."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbq_jax
from examples.llama import attention, hf, invariant, mesh, mismatch, train
from examples.llama.config import Config
from examples.llama.errors import UserError
from examples.llama.invariant import log_probabilities
from examples.llama.model import Llama, empty_cache
from fbq_jax import FallbackDot, recipes
from fbq_jax.export import ExportError
from tests.examples.small import small_config
from tests.marks import rows_with_first_fast

# On a GPU, what the backward pass of attention says of these lengths.
pytestmark = pytest.mark.filterwarnings("ignore:attention runs as XLA ops:UserWarning")

# Two or three tiles of keys on a CPU, and heads of a whole number of quantized blocks.
LENGTH = 70
CONFIG = small_config(
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    vocab_size=64,
    invariant=True,
)
PROMPTS = np.random.default_rng(0).integers(40, size=(8, 16), dtype=np.int32)
TOKENS = np.random.default_rng(1).integers(40, size=(8, LENGTH), dtype=np.int32)
# Where parts end: near the ends of tiles, and of the sequence.
LENGTHS = (1, 31, 33, 69)
# Every operation of the example that is not in the default model.
GEMMA = {"activation": "gelu_tanh", "unit_offset_norms": True, "post_norms": True}
GEMMA |= {"attn_softcap": 30.0, "logit_softcap": 20.0, "embed_scale": 11.3}
GEMMA |= {"sliding_window": 9, "sliding_layers": (0,), "tie_embeddings": True}
QWEN = {"qk_norm": True, "qkv_bias": True, "head_dim": 24}


def model_of(recipe, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return Llama(config, FallbackDot(recipes.NAMED[recipe]))


def variables_of(model):
    """Variables whose attention is far from uniform."""
    variables = jax.jit(model.init)(jax.random.key(0), PROMPTS[:1])
    params = jax.tree.map(lambda p: p * 5 if p.ndim > 1 else p, variables["params"])
    return {**variables, "params": params}


@pytest.mark.parametrize(
    ("recipe", "dtype", "options"),
    rows_with_first_fast(
        [
            ("rowwise", jnp.bfloat16, {}),
            ("row_block_lhs", jnp.bfloat16, {"saved_bits": 10, "remat": "codes"}),
            ("row_block_lhs", jnp.float32, {**QWEN, "unroll": True}),
            ("rowwise", jnp.float32, {**GEMMA, "saved_bits": 10, "remat": "full"}),
        ]
    ),
)
@pytest.mark.usefixtures("standard_promotion")
def test_sampling_and_training_give_equal_bits(recipe, dtype, options):
    """The frozen model samples at batch 8 and scores at batch 1; training at 8."""
    model = model_of(recipe, dtype=dtype, **options)
    variables = variables_of(model)
    count = LENGTH - PROMPTS.shape[1]
    found = mismatch.measure(model, variables, jnp.asarray(PROMPTS), count)
    assert found == {"at_once": 0, "one_by_one": 0}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.usefixtures("standard_promotion")
def test_the_ordinary_model_does_not(dtype):
    model = model_of("rowwise", dtype=dtype, invariant=False)
    variables = variables_of(model)
    found = mismatch.measure(model, variables, jnp.asarray(PROMPTS), 54)
    assert max(found.values()) > 0


@functools.partial(jax.jit, static_argnums=0)
def scores_of(model, variables, tokens):
    logits = model.apply(variables, tokens[:, :-1])
    return log_probabilities(logits, tokens[:, 1:])


@functools.partial(jax.jit, static_argnums=0)
def prefill(model, variables, tokens, cache):
    return model.apply(variables, tokens, cache)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("rowwise", jnp.bfloat16), ("row_block_lhs", jnp.float32)]
)
def test_prefill_has_the_bits_of_a_whole_pass(recipe, dtype):
    """Caches have other lengths, and the next part of a sequence has any."""
    model = model_of(recipe, dtype=dtype)
    variables = variables_of(model)
    tokens = jnp.asarray(TOKENS)
    expected = scores_of(model, variables, tokens)
    frozen = fbq_jax.freeze(model, variables, tokens)
    for length in LENGTHS:
        first, second = tokens[:3, :length], tokens[:3, length:-1]
        cache = empty_cache(model.config, 3, LENGTH + length)
        for part in (first, second) if second.size else (first,):
            logits, cache = prefill(model, frozen, part, cache)
            end = int(cache.length)
            found = log_probabilities(logits, tokens[:3, end : end + 1])
            np.testing.assert_array_equal(found[:, 0], expected[:3, end - 1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{}, {"saved_bits": 10, **GEMMA}, {**GEMMA, **QWEN}]
)
@pytest.mark.usefixtures("standard_promotion")
def test_gradients_are_those_of_the_ordinary_model(options):
    """The products are in floats backwards, where noise would hide differences."""

    @jax.default_matmul_precision("highest")  # TF32 changes the codes of activations
    @functools.partial(jax.jit, static_argnums=0)
    def grads_of(model, variables):
        def loss(params):
            changed = {**variables, "params": params}
            logits = model.apply(changed, TOKENS[:2, :40])
            return log_probabilities(logits, TOKENS[:2, 1:41]).mean()

        return jax.value_and_grad(loss)(variables["params"])

    floats = dataclasses.replace(recipes.switchback_q, dlhs=fbq_jax.FLOAT_GEMM)
    config = dataclasses.replace(CONFIG, dtype=jnp.float32, **options)
    model = Llama(config, FallbackDot(floats))
    variables = variables_of(model)
    value, grads = grads_of(model, variables)
    ordinary = Llama(dataclasses.replace(config, invariant=False), model.dot_general)
    expected, expected_grads = grads_of(ordinary, variables)
    # The ordinary head is in floats.
    assert float(value) == pytest.approx(float(expected), rel=0.01)

    def check(grad, expected):
        assert jnp.linalg.norm(grad - expected) < 0.1 * jnp.linalg.norm(expected)

    jax.tree.map(check, grads, expected_grads)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, 5.0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_computes_what_the_ordinary_one_does(window, softcap, dtype):
    draw = np.random.default_rng(0).standard_normal
    q = jnp.asarray(draw((2, 40, 6, 24)), dtype)
    k, v = (jnp.asarray(draw((2, 40, 2, 24)), dtype) for _ in range(2))
    options = {"window": window, "softcap": softcap, "scale": 0.3}
    # By default, a GPU multiplies float32 values in TF32.
    exactly = jax.default_matmul_precision("highest")
    with exactly, jax.numpy_dtype_promotion("standard"):
        (found, backward), (expected, expected_backward) = (
            jax.vjp(functools.partial(attend, **options), q, k, v)
            for attend in (invariant.attend, attention.attend)
        )
        grads, expected_grads = backward(found), expected_backward(found)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, expected)), atol=tolerance, rtol=0
    )
    jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)


@pytest.mark.parametrize("columns", [1, 24, 128, 5000])
def test_rows_do_not_depend_on_their_neighbours(columns):
    x = np.random.default_rng(0).standard_normal((1, 70, 2 * columns), np.float32)
    scale = jnp.linspace(0.5, 2, columns)

    def norm(x, scale):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return x * scale[None, None]

    def gate(gate, up):
        return jax.nn.silu(gate) * up

    @jax.jit
    def run(x):
        one = x[..., :columns]
        tokens = jnp.full(x.shape[:2], columns - 1)
        return {
            "norm": invariant.rms_norm(1e-5, norm, one, scale),
            "gate": invariant.pointwise(gate, x, count=2),
            "score": log_probabilities(one, tokens),
        }

    found = run(x)
    one, second = np.split(x, 2, axis=-1)
    expected = {"norm": norm(one, scale), "gate": gate(one, second)}
    expected["score"] = jax.nn.log_softmax(one)[..., -1]
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, found, expected)
    for first, last in ((0, 1), (69, 70), (3, 45)):
        part = run(x[:, first:last])
        whole = jax.tree.map(lambda y: y[:, first:last], found)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, part, whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", ["data=4", "data=2,fsdp=2", "fsdp=2,tensor=2"])
def test_devices_change_no_bits(devices):
    config = dataclasses.replace(CONFIG, dtype=jnp.bfloat16)
    options = Config(recipe="rowwise", invariant=True, reduce="int32")
    model = Llama(config, options.dot_general(experts=False))
    variables = variables_of(model)
    tokens = TOKENS[:, :65]  # devices have whole blocks of tokens
    expected = scores_of(model, variables, tokens)
    with mesh.use(mesh.make(devices)):
        sharded = jax.device_put(variables, mesh.shardings(variables))
        found = scores_of(model, sharded, mesh.distribute(tokens, "batch", None))
    np.testing.assert_array_equal(found, expected)


def test_what_cannot_be_invariant_is_an_error(monkeypatch):
    takes = "invariant takes a batch-invariant recipe: .*row_block_lhs, .*rowwise"
    for recipe in ("bf16", "fallback", "fp8_current"):
        with pytest.raises(UserError, match=takes):
            Config(recipe=recipe, invariant=True)
    for dot_general in (None, FallbackDot(recipes.block)):
        with pytest.raises(UserError, match=takes):
            Llama(CONFIG, dot_general).init(jax.random.key(0), TOKENS)
    with pytest.raises(UserError, match="invariant takes a model without experts"):
        small_config(num_experts=4, invariant=True)
    for own in {"invariant": True}, {"invariant": False, "quantize_head": True}:
        with pytest.raises(ExportError, match=r"has no INT8 head.*: export takes hf"):
            hf.check_exportable("blockwise_int8", model_of("rowwise", **own))
    with mesh.use(mesh.make("tensor=2")), pytest.raises(UserError, match="int32 over"):
        model_of("rowwise").init(jax.random.key(0), TOKENS)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(UserError, match="takes a CPU or an NVIDIA GPU, got a tpu"):
        log_probabilities(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
def test_the_command_compares_models_of_a_run(text, tmp_path, capsys):
    out, file = tmp_path / "run", tmp_path / "mismatch.json"
    argv = "--invariant --recipe=rowwise --hidden=128 --ffn=128 --layers=1 --heads=2 "
    argv += "--kv-heads=1 --seq=40 --batch=2 --accumulate=1 --steps=1 "
    argv += f"--data={text} --out={out}"
    assert train.main(argv.split()) == 0
    options = ["--prompts=2", "--recipes=bf16,rowwise", f"--json={file}"]
    capsys.readouterr()
    assert mismatch.main([str(out), "--tokens=24", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].split() == ["rowwise", "True", "0", "0"]
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    kinds = [(row["recipe"], row["invariant"]) for row in rows]
    assert kinds == [("bf16", False), ("rowwise", False), ("rowwise", True)]
    assert mismatch.main([str(out), "--tokens=25", *options]) == 1
    assert mismatch.main(["--recipes=rowwise,int8"]) == 1
    errors = capsys.readouterr().err
    assert "error: tokens takes at most 24" in errors
    assert "got int8" in errors
