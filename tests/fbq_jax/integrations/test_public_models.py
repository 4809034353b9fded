"""Public models as their packages ship them: ``pip install -e '.[models]'``.

Weights are random and sizes tiny.  Models whose package is not installed are skipped.
``gemma`` needs an environment of its own: with its ``typeguard``, Griffin does not run.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fbq_jax
from fbq_jax import assert_live, recipes
from fbq_jax.integrations import qwix

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's code

RULES = {".*": recipes.fallback}
TOKENS = jax.random.randint(jax.random.key(3), (2, 16), 0, 64)
POSITIONS = jnp.broadcast_to(jnp.arange(16), (2, 16))
IMAGES = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


@pytest.fixture(autouse=True)
def _usual_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def next_token_loss(logits: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, TOKENS[:, 1:, None], -1))


def hugging_face(
    model: str, config: str, shape: tuple[int, ...], **options: Any
) -> Any:
    transformers = pytest.importorskip("transformers", "4.40")
    if not hasattr(transformers, model):
        pytest.skip("transformers without Flax")
    settings = getattr(transformers, config)(**options)
    checkpointing = (
        {"gradient_checkpointing": True} if model.endswith("MaskedLM") else {}
    )
    wrapper = getattr(transformers, model)(
        settings, input_shape=shape, _do_init=False, **checkpointing
    )
    return wrapper.module


def llama() -> Any:
    options = {"vocab_size": 64, "num_key_value_heads": 2, **SIZES}
    return hugging_face("FlaxLlamaForCausalLM", "LlamaConfig", (1, 8), **options)


def gpt2() -> Any:
    options = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return hugging_face(
        "FlaxGPT2LMHeadModel", "GPT2Config", (1, 8), n_positions=32, **options
    )


def vit() -> Any:
    return hugging_face(
        "FlaxViTForImageClassification",
        "ViTConfig",
        (1, 16, 16, 3),
        image_size=16,
        patch_size=4,
        **SIZES,
    )


def bert() -> Any:
    """With rematerialized layers."""
    options = {"vocab_size": 64, "max_position_embeddings": 32, **SIZES}
    return hugging_face("FlaxBertForMaskedLM", "BertConfig", (1, 8), **options)


def griffin() -> Any:
    """With rematerialized layers."""
    package = pytest.importorskip("recurrentgemma.jax")
    common = importlib.import_module("recurrentgemma.common")
    kinds = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=64,
        width=64,
        mlp_expanded_width=128,
        num_heads=4,
        block_types=(kinds.RECURRENT, kinds.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8,
        logits_soft_cap=30.0,
        lru_width=64,
        scan_type=common.ScanType.ASSOCIATIVE_NATIVE,
    )
    return package.Griffin(config, dtype=jnp.float32, param_dtype=jnp.float32)


def gemma_vision() -> Any:
    """With ``nn.scan`` over its layers."""
    pytest.importorskip("gemma", "4.0")
    module = importlib.import_module("gemma.gm.nn.gemma4.vision._transformer")
    return module.VisionTransformer(
        d_model=64, ffw_hidden=128, num_heads=4, num_layers=2
    )


CAUSAL = (TOKENS, jnp.ones_like(TOKENS), POSITIONS)
MASKED = (TOKENS, jnp.ones_like(TOKENS), jnp.zeros_like(TOKENS), POSITIONS, None)

PATCHES = (
    jax.random.normal(jax.random.key(2), (2, 16, 64)),
    jnp.ones((2, 16), bool),
    jnp.broadcast_to(jnp.indices((4, 4)).reshape(2, 16).T, (2, 16, 2)),
)

# The model, its arguments, how it is quantized, and the number of its products.
LINEN = {
    "transformers Llama": (llama, CAUSAL, fbq_jax.quantize, 15),
    "transformers ViT": (vit, (IMAGES,), fbq_jax.quantize, 14),
    "transformers BERT, remat": (bert, MASKED, fbq_jax.quantize, 14),
    "transformers GPT-2": (gpt2, CAUSAL, qwix.quantize, 9),
    "Gemma 4's vision, scan": (gemma_vision, PATCHES, qwix.quantize, 5),
    "recurrentgemma Griffin": (griffin, (TOKENS, POSITIONS), qwix.quantize, 14),
}


def linen_loss(output: Any) -> jax.Array:
    logits = getattr(output, "logits", None)
    logits = output[0] if logits is None else logits
    return next_token_loss(logits) if logits.ndim == 3 else jnp.mean(logits**2)


def train_linen(model: Any, args: Any, kwargs: Any) -> tuple[list[float], list[Any]]:
    """The losses of two steps, and the variables before, between and after them."""
    history = [jax.jit(lambda key: model.init(key, *args, **kwargs))(jax.random.key(0))]

    @jax.jit
    def step(variables: Any) -> Any:
        def loss(params: Any) -> Any:
            output, state = model.apply(
                {**variables, "params": params}, *args, mutable=["fallback"], **kwargs
            )
            return linen_loss(output), state

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(
            variables["params"]
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return value, {"params": params, **state}

    losses = []
    for _ in range(2):
        value, variables = step(history[-1])
        losses.append(float(value))
        history.append(variables)
    return losses, history


def check_report(
    report: fbq_jax.RulesReport, products: int, matrices: set[str]
) -> None:
    """Each matrix is in the report; in float are those that no product reads."""
    assert len(report.products) == products
    quantized = {p.parameter for p in report.products}
    in_float = {p.parameter for p in report.float_parameters}
    assert quantized | in_float == matrices
    assert not quantized & in_float
    for parameter in report.float_parameters:
        assert parameter.reason.startswith("no product reads it"), parameter
    assert report.unused_rules == report.unmatched_layers == ()


@pytest.mark.parametrize("name", LINEN)
def test_linen(name: str) -> None:
    make, args, quantize, products = LINEN[name]
    model = make()
    kwargs = {"return_logits": True} if make is griffin else {}
    quantized, report = quantize(model, RULES, jax.random.key(0), *args, **kwargs)
    expected, (variables, *_) = train_linen(model, args, kwargs)
    matrices = {
        "/".join(key.key for key in path)
        for path, leaf in jax.tree.leaves_with_path(variables["params"])
        if leaf.ndim >= 2 + (make is gemma_vision)  # an axis of layers
    }
    check_report(report, products, matrices)
    losses, history = train_linen(quantized, args, kwargs)
    jax.tree.map(
        np.testing.assert_array_equal, variables["params"], history[0]["params"]
    )
    np.testing.assert_allclose(losses, expected, rtol=0.01, atol=1e-4)
    stats = [fbq_jax.fallback_stats(variables) for variables in history]
    assert len(stats[0]) == products
    assert_live(stats[0], stats[1])
    assert_live(stats[1], stats[2])


def tunix(module: str, model: str) -> Callable[[], Any]:
    """With rematerialized attention and MLPs."""

    def make() -> Any:
        pytest.importorskip("tunix")
        package = importlib.import_module(f"tunix.models.{module}.model")
        config = package.ModelConfig(
            num_layers=2,
            vocab_size=64,
            embed_dim=64,
            hidden_dim=128,
            num_heads=4,
            head_dim=16,
            num_kv_heads=2,
            rope_theta=10_000,
            norm_eps=1e-6,
            remat_config=package.RematConfig.BLOCK,
        )
        return getattr(package, model)(config, rngs=nnx.Rngs(0))

    return make


MASK = jnp.broadcast_to(jnp.tril(jnp.ones((16, 16), bool)), (2, 16, 16))
NNX = {
    "tunix Llama 3, remat": tunix("llama3", "Llama3"),
    "tunix Qwen 3, remat": tunix("qwen3", "Qwen3"),
}


def train_nnx(model: Any, args: Any) -> tuple[list[float], list[Any]]:
    """The losses of two steps, and the statistics before, between and after them."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(
            lambda model: next_token_loss(model(*args)[0])
        )(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return loss, nnx.state(model)

    losses, stats = [], [fbq_jax.nnx.fallback_stats(model)]
    for _ in range(2):
        loss, state = step(state)
        losses.append(float(loss))
        stats.append(fbq_jax.nnx.fallback_stats(nnx.merge(graphdef, state)))
    return losses, stats


@pytest.mark.parametrize("name", NNX)
def test_nnx(name: str) -> None:
    args = (TOKENS, POSITIONS, None, MASK)
    model = NNX[name]()
    matrices = {
        "/".join(str(key.key) for key in path if hasattr(key, "key"))
        for path, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
        if leaf.ndim >= 2
    }
    expected, _ = train_nnx(model, args)
    report = qwix.quantize_nnx(model, RULES, *args, rngs=nnx.Rngs(5))
    check_report(report, 15, matrices)
    losses, stats = train_nnx(model, args)
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    assert len(stats[0]) == 15
    assert_live(stats[0], stats[1])
    assert_live(stats[1], stats[2])


ARGS = (TOKENS, POSITIONS, None, MASK)
BATCH = {
    "input_tokens": TOKENS,
    "input_mask": jnp.ones_like(TOKENS),
    "positions": POSITIONS,
    "attention_mask": MASK,
}


def add_lora(model: Any) -> Any:
    google_qwix = importlib.import_module("qwix")
    provider = google_qwix.LoraProvider(module_path=".*proj", rank=4, alpha=8.0)
    return google_qwix.apply_lora_to_model(model, provider, *ARGS, rngs=nnx.Rngs(7))


def quantize_base(model: Any) -> Any:
    qwix.quantize_nnx(model, {".*": recipes.block}, *ARGS, rngs=nnx.Rngs(5))
    return model


def freeze_base(model: Any) -> Any:
    return fbq_jax.nnx.freeze(model, *ARGS)


def fit(model: Any, path: Path, steps: int = 4) -> list[float]:
    """The training losses of Tunix's trainer, which also evaluates."""
    trainers = importlib.import_module("tunix.sft.peft_trainer")
    optax = importlib.import_module("optax")
    config = trainers.TrainingConfig(
        eval_every_n_steps=2, max_steps=steps, checkpoint_root_directory=str(path)
    )
    trainer = trainers.PeftTrainer(model, optax.adam(1e-2), config)
    trainer = trainer.with_gen_model_input_fn(lambda batch: batch)
    trainer.eval_loss_fn = fbq_jax.nnx.evaluation()(trainer.eval_loss_fn)
    losses = []
    buffer = trainer._buffer_metrics

    def record(metrics: Any, loss: Any, step: int, **kwargs: Any) -> Any:
        if kwargs:  # an evaluation has none
            losses.append(float(loss))
        return buffer(metrics, loss=loss, step=step, **kwargs)

    trainer._buffer_metrics = record
    trainer.train([BATCH] * steps, [BATCH])
    return losses


CHANGES = {
    "LoRA, quantize": (add_lora, quantize_base),
    "quantize, LoRA": (quantize_base, add_lora),
    "quantize, freeze, LoRA": (quantize_base, freeze_base, add_lora),
}


@pytest.mark.parametrize("name", NNX)
def test_lora_by_tunixs_trainer(name: str, tmp_path: Path) -> None:
    expected = fit(add_lora(NNX[name]()), tmp_path / "float")
    assert expected[-1] < expected[0]
    for order, changes in CHANGES.items():
        model = NNX[name]()
        for change in changes:
            model = change(model)
        before = fbq_jax.nnx.fallback_stats(model)
        losses = fit(model, tmp_path / order)
        np.testing.assert_allclose(losses, expected, rtol=0.02)
        after = fbq_jax.nnx.fallback_stats(model)
        steps = 0 if freeze_base in changes else len(losses)
        assert len(after) == 15
        for layer, stats in after.items():
            assert int(stats.count) == int(before[layer].count) + steps, layer
