"""Builds the model and the data of a run, and loads models that were trained."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.llama import checkpoint, hf
from examples.llama.config import AUTO, SAVED_BITS, Config
from examples.llama.data import Corpus, load_corpus, token_ids_folder
from examples.llama.errors import UserError
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.run_folder import checkpoints, has_run, read_config
from examples.llama.step import PyTree, TrainState, init_state, make_optimizer
from examples.llama.text import Codec, TokenizerOf, codec_of_run
from fbq_jax import FallbackDot, RulesDot, freeze


def build(config: Config) -> tuple[Llama, PyTree | None, Corpus]:
    """Builds the model, the weights to start from or None, and the data of a run."""
    data = None if config.data is None else Path(config.data)
    if (folder := config.from_hf) is None:
        corpus = load_corpus(data)
        return with_recipe(config, config.sizes(corpus.vocab_size)), None, corpus
    sizes, weights = hf.load(folder)
    is_text = token_ids_folder(data) is None
    tokenizer = hf.load_tokenizer(folder) if is_text else None
    if is_text and tokenizer is None:
        raise UserError(
            f"{folder} has no tokenizer to read text with: set --data to token ids"
        )
    corpus = load_corpus(data, tokenizer)
    corpus.check_fits(sizes.vocab_size)
    if config.seq > (longest := sizes.max_seq_len):
        got = f"got {config.seq}"
        raise UserError(f"seq takes at most {longest} with {folder}, {got}")
    return with_recipe(config, sizes), weights, corpus


def build_model(config: Config) -> Llama:
    """Builds the model of a run, without the data for one that was loaded."""
    if config.from_hf is None:
        return build(config)[0]
    return with_recipe(config, hf.load(config.from_hf)[0])


def with_recipe(config: Config, sizes: LlamaConfig) -> Llama:
    """Builds a model with the recipe of a run, and what its layers save."""
    dot_general = config.dot_general(experts=sizes.num_experts is not None)
    saved_bits = config.saved_bits
    if saved_bits is None and (dot_general is not None or config.recipe == AUTO):
        saved_bits = SAVED_BITS
    sizes = dataclasses.replace(
        sizes,
        remat=config.remat,
        unroll=config.unroll,
        saved_bits=saved_bits or None,
        invariant=config.invariant,
        quantize_head=config.quantize_head,
    )
    return Llama(sizes, dot_general)


def last_state(config: Config, out: Path) -> TrainState:
    """Returns the state in the latest checkpoint of the run in `out`, as `restore`."""
    model = build_model(config)
    like = init_state(model, make_optimizer(config)[0], None, config.seed)
    return checkpoint.restore(checkpoints(out), like)


WEIGHTS = ("codes", "floats")


class Trained(NamedTuple):
    """A trained model, its variables and codec, and what it multiplies by, in words."""

    model: Llama
    variables: dict[str, Any]
    codec: Codec
    weights: str


def load(folder: Path, weights: str | None = None) -> Trained:
    """Loads the latest checkpoint of a run, or a model that `hf.load` reads.

    ``weights`` "codes" multiplies by the INT8 codes of ``fbq_jax.freeze``, "floats" by
    weights in the model's dtype. None takes codes of a run with an INT8 recipe, and
    floats of a checkpoint.
    """
    if weights not in (None, *WEIGHTS):
        raise UserError(f"weights takes one of {', '.join(WEIGHTS)}, got {weights!r}")
    if hf.is_checkpoint(folder):
        if weights == "codes":
            raise UserError(f"{folder} is a model, which runs with weights in floats")
        name, tokenizer = hf.quantization(folder), TokenizerOf(folder)
        sizes, params = hf.load(folder)
        source = "" if name is None else f", from {name}"
        return _in_floats(Llama(sizes), {"params": params}, tokenizer, source)
    if not has_run(folder):
        raise UserError(f"{folder} holds neither a run nor a model")
    config = read_config(folder)
    if config.from_hf is not None and hf.is_checkpoint(folder / "hf"):
        # The run may have moved, or the model that it started from.
        config = dataclasses.replace(config, from_hf=str(folder / "hf"))
    codec, model = codec_of_run(config), build_model(config)
    sizes = dataclasses.replace(model.config, remat="none", unroll=False)
    model = Llama(sizes, model.dot_general)
    quantized = isinstance(model.dot_general, FallbackDot | RulesDot)
    if weights == "codes" and not quantized:
        raise UserError(f"{folder} has {config.recipe}: codes take an INT8 recipe")
    state = last_state(config, folder)
    if weights == "floats":
        sizes = dataclasses.replace(sizes, invariant=False, quantize_head=False)
        return _in_floats(Llama(sizes), {"params": state.params}, codec)
    if not quantized:
        return _in_floats(model, state.variables(), codec)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    frozen = freeze(model, state.variables(), tokens)
    return Trained(model, frozen, codec, f"INT8 codes ({config.recipe})")


def _in_floats(
    model: Llama, variables: dict[str, Any], codec: Codec, source: str = ""
) -> Trained:
    """The model with matrices in the dtype that it casts them to."""
    dtype = jnp.dtype(model.config.dtype)

    def cast(path: tuple[Any, ...], x: Any) -> jax.Array:
        *_, module, name = (key.key for key in path)
        # Routers of experts stay in float32.
        is_matrix = name in ("kernel", "embedding") and module != "router"
        return jnp.asarray(x, dtype if is_matrix else x.dtype)

    params = jax.tree.map_with_path(cast, variables["params"])
    described = f"{dtype.name} weights{source}"
    return Trained(model, {**variables, "params": params}, codec, described)
