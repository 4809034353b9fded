"""Public models as their packages ship them, with tiny sizes and random weights.

``pip install '.[models]'`` installs the packages, except two that need their own
environments: with the ``typeguard`` of ``gemma``, Griffin does not run, and
``jax-image-models`` and ``recurrentgemma`` exclude each other.

``python -m tests.fbq_jax.contrib.public_models`` trains those that are installed,
by this library and by Qwix, and replaces their rows in ``public_models.json``.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from examples.quickstart.qwen3 import draw_mlps
from fbq_jax import recipes
from fbq_jax.bench import results
from fbq_jax.contrib import qwix
from fbq_jax.linen.whole_models import quantize as quantize_linen
from fbq_jax.nnx.rules import quantize as quantize_nnx
from fbq_jax.recipes.rules_report import RulesReport

RULES = {".*": recipes.fallback}
TOKENS = jax.random.randint(jax.random.key(3), (2, 16), 0, 64)
POSITIONS = jnp.broadcast_to(jnp.arange(16), (2, 16))
MASK = jnp.broadcast_to(jnp.tril(jnp.ones((16, 16), bool)), (2, 16, 16))
_ONES = jnp.ones_like(TOKENS)
_IMAGES = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
_PATCHES = jax.random.normal(jax.random.key(2), (2, 16, 64))
_PATCH_POSITIONS = jnp.broadcast_to(jnp.indices((4, 4)).reshape(2, 16).T, (2, 16, 2))
_LATENTS = jax.random.normal(jax.random.key(4), (2, 4, 8, 8))
_SERIES = jax.random.normal(jax.random.key(5), (2, 4, 32))
_LEARNING_RATE = 0.1


def _output(outputs: Any) -> jax.Array:
    """The first output of a model that has several."""
    for name in ("logits", "sample"):
        if hasattr(outputs, name):
            return getattr(outputs, name)
        if isinstance(outputs, dict) and name in outputs:
            return outputs[name]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def next_token_loss(outputs: Any) -> jax.Array:
    """The cross entropy of the next token."""
    logits = _output(outputs)[:, :-1].astype(jnp.float32)
    scores = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(scores, TOKENS[:, 1:, None], -1))


def mean_square(outputs: Any) -> jax.Array:
    """The mean square of the output."""
    return jnp.mean(_output(outputs) ** 2)


def pairs_loss(outputs: Any) -> jax.Array:
    """The cross entropy of each image with its own text."""
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(outputs)))


class PublicModel(NamedTuple):
    """A model, and a call of it.

    Attributes:
      package: the distribution that has it.
      module: the module of the package that has it.
      make: makes the model, from that module.
      function: ``quantize``, with the module that has it.
      args: the arguments of a call.
      kwargs: keyword arguments of the same call.
      loss: of what the model returns.
      stacks: the paths of modules whose parameters have an axis of layers.
    """

    package: str
    module: str
    make: Callable[[Any], Any]
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    loss: Callable[[Any], jax.Array] = next_token_loss
    stacks: tuple[str, ...] = ()

    def is_installed(self) -> bool:
        """Whether a version of the package is installed that has the model."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False

    def build(self) -> Any:
        """Makes the model."""
        return self.make(importlib.import_module(self.module))

    def quantize(self, model: Any) -> tuple[Any, RulesReport]:
        """The quantized model and the report."""
        quantize = _FUNCTIONS[self.function]
        if not isinstance(model, nnx.Module):
            return quantize(model, RULES, jax.random.key(0), *self.args, **self.kwargs)
        found = quantize(
            model, RULES, *self.args, quantize_rngs=nnx.Rngs(5), **self.kwargs
        )
        return (model, found) if isinstance(found, RulesReport) else found

    def train(self, model: Any) -> tuple[list[float], list[Any]]:
        """Takes two steps of gradient descent.

        Returns:
          The losses; and the variables of Linen, or the state of NNX, before, between
          and after the steps.
        """
        train = _train_nnx if isinstance(model, nnx.Module) else _train_linen
        return train(model, self)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fbq_jax.quantize": quantize_linen,
    "fbq_jax.nnx.quantize": quantize_nnx,
    "qwix.quantize": qwix.quantize,
    "qwix.quantize_nnx": qwix.quantize_nnx,
}


def one_device() -> contextlib.AbstractContextManager[Any]:
    """The mesh of one device, which some models need."""
    axis = jax.sharding.AxisType.Auto
    return jax.set_mesh(jax.make_mesh((1,), ("fsdp",), axis_types=(axis,)))


def _train_linen(model: Any, public: PublicModel) -> tuple[list[float], list[Any]]:
    args, kwargs = public.args, public.kwargs
    history = [jax.jit(lambda key: model.init(key, *args, **kwargs))(jax.random.key(0))]

    @jax.jit
    def step(variables: Any) -> Any:
        def loss(params: Any) -> Any:
            output, state = model.apply(
                {**variables, "params": params}, *args, mutable=["fallback"], **kwargs
            )
            return public.loss(output), state

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(
            variables["params"]
        )
        return value, {"params": _descend(variables["params"], grads), **state}

    return _two_steps(step, history)


def _train_nnx(model: Any, public: PublicModel) -> tuple[list[float], list[Any]]:
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        value, grads = nnx.value_and_grad(
            lambda model: public.loss(model(*public.args, **public.kwargs))
        )(model)
        nnx.update(model, _descend(nnx.state(model, nnx.Param), grads))
        return value, nnx.state(model)

    return _two_steps(step, [state])


def _two_steps(
    step: Callable[[Any], Any], history: list[Any]
) -> tuple[list[float], list[Any]]:
    losses = []
    for _ in range(2):
        value, variables = step(history[-1])
        losses.append(float(value))
        history.append(variables)
    return losses, history


def _descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - _LEARNING_RATE * g, params, grads)


def _hugging_face(
    model: str, config: str, *, checkpointing: bool = False, **settings: Any
) -> Callable[[Any], Any]:
    def make(module: Any) -> Any:
        transformers = importlib.import_module("transformers")
        options = {"gradient_checkpointing": True} if checkpointing else {}
        configured = getattr(transformers, config)(**settings)
        return getattr(module, model)(configured, _do_init=False, **options).module

    return make


def _griffin(module: Any) -> Any:
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
    return module.Griffin(config, dtype=jnp.float32, param_dtype=jnp.float32)


def _gemma_vision(module: Any) -> Any:
    return module.VisionTransformer(
        d_model=64, ffw_hidden=128, num_heads=4, num_layers=2
    )


def _clip(module: Any) -> Any:
    sharding = importlib.import_module("jimm.common.sharding").NoSharding
    return module.CLIP(
        image_resolution=16,
        vision_layers=2,
        vision_hidden_size=64,
        vision_patch_size=4,
        context_length=16,
        vocab_size=64,
        text_hidden_size=64,
        num_text_heads=4,
        num_text_layers=2,
        rngs=nnx.Rngs(0),
        sharding=sharding,
    )


def _tunix(model: str) -> Callable[[Any], Any]:
    def make(module: Any) -> Any:
        config = module.ModelConfig(
            num_layers=2,
            vocab_size=64,
            embed_dim=64,
            hidden_dim=128,
            num_heads=4,
            head_dim=16,
            num_kv_heads=2,
            rope_theta=10_000,
            norm_eps=1e-6,
            remat_config=module.RematConfig.BLOCK,
        )
        rngs = nnx.Rngs(0)
        made = getattr(module, model)(config, rngs=rngs)
        draw_mlps(made, rngs)
        return made

    return make


def _u_net(module: Any) -> Any:
    return module.FlaxUNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        attention_head_dim=4,
        cross_attention_dim=64,
    )


def _mamba(module: Any) -> Any:
    config = module.Mamba2Config(
        vocab_size=64,
        hidden_size=64,
        state_size=16,
        head_dim=16,
        chunk_size=8,
        num_hidden_layers=2,
    )
    return module.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))


def _timesfm(module: Any) -> Any:
    return nnx.clone(_forecaster(module))


@functools.cache
def _forecaster(module: Any) -> Any:
    """One model, as the package's models share a generator for their weights."""
    resized = dataclasses.replace
    whole = module.TimesFM_2p5_200M_flax_module.config
    sizes = {"model_dims": 64, "hidden_dims": 64, "num_heads": 4}
    projection = {"input_dims": 64, "hidden_dims": 64}
    stack = whole.stacked_transformers
    layer = resized(stack.transformer, **sizes)
    point = whole.output_projection_point
    quantiles = whole.output_projection_quantiles
    start = jnp.zeros((2, 2), jnp.int32)
    empty = jnp.zeros((2, 2, 4, 4, 16))

    class Forecaster(module.TimesFM_2p5_200M_flax_module):
        """The point forecasts; the package's call without a cache is an error."""

        config = resized(
            whole,
            output_quantile_len=64,
            tokenizer=resized(whole.tokenizer, hidden_dims=64, output_dims=64),
            stacked_transformers=resized(stack, num_layers=2, transformer=layer),
            output_projection_point=resized(point, output_dims=1280, **projection),
            output_projection_quantiles=resized(
                quantiles, output_dims=640, **projection
            ),
        )

        def __call__(self, inputs: jax.Array, masks: jax.Array) -> jax.Array:
            cache = module.util.DecodeCache(start, start, empty, empty)
            return super().__call__(inputs, masks, cache)[0][2]

    model = Forecaster()
    # Their zeros, which a checkpoint replaces, would leave nothing to multiply.
    for _, norm in nnx.iter_modules(model):
        if hasattr(norm, "scale"):
            norm.scale[...] = jnp.full_like(norm.scale[...], 0.5)
    return model


_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_TEXT = _SIZES | {"vocab_size": 64}
_GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
_CAUSAL = (TOKENS, _ONES, POSITIONS)
_DECODER = (TOKENS, POSITIONS, None, MASK)
_LINEN, _OWN_CODE = "fbq_jax.quantize", "qwix.quantize"
_NNX, _OWN_CODE_NNX = "fbq_jax.nnx.quantize", "qwix.quantize_nnx"

MODELS = {
    "Llama": PublicModel(
        *("transformers", "transformers.models.llama.modeling_flax_llama"),
        _hugging_face(
            *("FlaxLlamaForCausalLM", "LlamaConfig"), num_key_value_heads=2, **_TEXT
        ),
        *(_LINEN, _CAUSAL),
    ),
    "ViT": PublicModel(
        *("transformers", "transformers.models.vit.modeling_flax_vit"),
        _hugging_face(
            *("FlaxViTForImageClassification", "ViTConfig"),
            **(_SIZES | {"image_size": 16, "patch_size": 4}),
        ),
        *(_LINEN, (_IMAGES,)),
        loss=mean_square,
    ),
    "BERT, `nn.remat`": PublicModel(
        *("transformers", "transformers.models.bert.modeling_flax_bert"),
        _hugging_face(
            *("FlaxBertForMaskedLM", "BertConfig"),
            checkpointing=True,
            **(_TEXT | {"max_position_embeddings": 32}),
        ),
        *(_LINEN, (TOKENS, _ONES, jnp.zeros_like(TOKENS), POSITIONS, None)),
    ),
    "GPT-2": PublicModel(
        *("transformers", "transformers.models.gpt2.modeling_flax_gpt2"),
        _hugging_face("FlaxGPT2LMHeadModel", "GPT2Config", **_GPT2),
        *(_OWN_CODE, _CAUSAL),
    ),
    "Stable Diffusion's U-Net": PublicModel(
        *("diffusers", "diffusers.models.unets.unet_2d_condition_flax", _u_net),
        *(_LINEN, (_LATENTS, jnp.array([3, 7]), _PATCHES)),
        loss=mean_square,
    ),
    "Griffin, `nn.remat`": PublicModel(
        *("recurrentgemma", "recurrentgemma.jax", _griffin),
        *(_OWN_CODE, (TOKENS, POSITIONS), {"return_logits": True}),
    ),
    "Gemma 4's vision transformer, `nn.scan`": PublicModel(
        *("gemma", "gemma.gm.nn.gemma4.vision._transformer", _gemma_vision),
        *(_OWN_CODE, (_PATCHES, jnp.ones((2, 16), bool), _PATCH_POSITIONS)),
        loss=mean_square,
        stacks=("",),
    ),
    "CLIP, `nnx.scan`": PublicModel(
        *("jax-image-models", "jimm.models.clip.clip_model", _clip),
        *(_NNX, (_IMAGES, TOKENS)),
        loss=pairs_loss,
        stacks=("vision_model/encoder/layers", "text_model/transformer/layers"),
    ),
    "TimesFM 2.5, `nnx.scan`": PublicModel(
        *("timesfm", "timesfm.timesfm_2p5.timesfm_2p5_flax", _timesfm),
        *(_NNX, (_SERIES, jnp.zeros((2, 4, 32), bool))),
        loss=mean_square,
        stacks=("stacked_xf",),
    ),
    "Mamba 2": PublicModel(
        *("mamba2-jax", "mamba2_jax.modeling", _mamba, _OWN_CODE_NNX, (TOKENS,))
    ),
    "Llama 3, `nnx.remat`": PublicModel(
        *("google-tunix", "tunix.models.llama3.model", _tunix("Llama3")),
        *(_OWN_CODE_NNX, _DECODER),
    ),
    "Qwen 3, `nnx.remat`": PublicModel(
        *("google-tunix", "tunix.models.qwen3.model", _tunix("Qwen3")),
        *(_OWN_CODE_NNX, _DECODER),
    ),
}

ROWS = Path(__file__).with_suffix(".json")


def write_rows(path: Path = ROWS) -> None:
    """Trains the installed models; rows of other models in the file stay."""
    rows = json.loads(path.read_text())
    for name, public in MODELS.items():
        if public.is_installed():
            print(f"training {name} of {public.package}", flush=True)
            with warnings.catch_warnings(), one_device():
                warnings.simplefilter("ignore")  # of other people's code
                rows[name] = _row(public)
    results.write(path, rows)


def _row(public: PublicModel) -> dict[str, Any]:
    expected, _ = public.train(public.build())
    model, report = public.quantize(public.build())
    losses, _ = public.train(model)
    return {
        "date": results.today(),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "versions": results.versions("qwix", public.package),
        "package": public.package,
        "api": "Linen" if isinstance(model, nn.Module) else "NNX",
        "function": public.function,
        "products": len(report.products),
        "in_float": [parameter._asdict() for parameter in report.float_parameters],
        "losses_in_float": expected,
        "losses": losses,
        "qwix": _by_qwix(public),
    }


def _by_qwix(public: PublicModel) -> dict[str, Any]:
    """What Qwix's own quantized training makes of a model, in INT8."""
    import qwix as google_qwix

    model = public.build()
    rule = google_qwix.QtRule(
        module_path=".*", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"
    )
    inputs = {} if isinstance(model, nn.Module) else public.kwargs
    args = () if isinstance(model, nn.Module) else public.args
    provider = google_qwix.QtProvider([rule])
    try:
        model = google_qwix.quantize_model(model, provider, *args, **inputs)
        products = _products(public, model)
        losses, _ = public.train(model)
    except Exception as error:  # whatever it is, the table shows it
        first = str(error).strip().partition("\n")[0]
        return {"error": f"{type(error).__name__}: {first}"}
    return {
        "products": products["int8"],
        "products_in_float": products.total() - products["int8"],
        "losses": losses,
    }


def _products(public: PublicModel, model: Any) -> Counter[str]:
    """Counts the products in a forward pass by the dtype of both operands."""
    args, kwargs = public.args, public.kwargs
    if isinstance(model, nn.Module):
        key = jax.random.key(0)
        state = jax.eval_shape(lambda: model.init(key, *args, **kwargs))
    else:
        graphdef, state = nnx.split(model)

    def forward(state: Any) -> Any:
        if isinstance(model, nn.Module):
            return model.apply(state, *args, **kwargs)
        return nnx.merge(graphdef, state)(*args, **kwargs)

    return Counter(
        str(jnp.promote_types(*(x.aval.dtype for x in eqn.invars[:2])))
        for eqn in equations(jax.make_jaxpr(forward)(state).jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of the jaxprs in their parameters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(tuple(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


if __name__ == "__main__":
    write_rows()
