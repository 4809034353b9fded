"""Loads a trained model to run it: from the folder of a run, or of a checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.llama import hf
from examples.llama.build import build_model
from examples.llama.config import Config, ConfigError
from examples.llama.data import TOKENIZER, is_token_ids, tokenizer_folder
from examples.llama.model import Llama
from examples.llama.run_folder import RunError, has_run, read_config
from examples.llama.text import Bytes, Codec, TokenizerOf
from examples.llama.training import last_state
from fbq_jax import FallbackDot, freeze

WEIGHTS = ("codes", "floats")


class Trained(NamedTuple):
    """A model that was trained.

    Attributes:
        model: The model, which rematerializes nothing and loops over its layers.
        variables: Its variables.
        codec: Turns text into tokens and back.
        weights: What the projections multiply by, for people.
    """

    model: Llama
    variables: dict[str, Any]
    codec: Codec
    weights: str


def load(folder: Path, weights: str | None = None) -> Trained:
    """Loads a model.

    Args:
        folder: The folder of a run, whose latest checkpoint is taken, or of a
            checkpoint in Hugging Face's format, with weights in floats or exported.
        weights: "codes" multiplies by the INT8 codes of ``fbq_jax.freeze``, "floats" by
            weights in the model's dtype. None takes codes of a run with an INT8 recipe,
            and floats of a checkpoint.

    Raises:
        ConfigError: The model has no codes.
        RunError: The folder is neither, or there is no tokenizer.
        RestoreError: The run has no checkpoint, or it is damaged.
        CheckpointError: The checkpoint of Hugging Face's format cannot be read.
        ValueError: ``freeze`` cannot freeze the model.
    """
    if weights not in (None, *WEIGHTS):
        raise ConfigError(f"weights takes one of {', '.join(WEIGHTS)}, got {weights!r}")
    if hf.is_checkpoint(folder):
        return _load_checkpoint(folder, weights)
    if not has_run(folder):
        raise RunError(
            f"{folder} holds neither a run nor a model: it has no config.json"
        )
    return _load_run(folder, weights)


def _load_checkpoint(folder: Path, weights: str | None) -> Trained:
    if weights == "codes":
        raise ConfigError(
            f"{folder} is a checkpoint in Hugging Face's format, which runs with "
            "weights in floats; the folder of its run has codes"
        )
    name, codec = hf.quantization(folder), _codec_of(folder)
    config, params = hf.load(folder)
    described = f"{jnp.dtype(config.dtype).name} weights"
    if name is not None:
        described += f", from {name}"
    model = Llama(config)
    return Trained(model, {"params": _cast(model, params)}, codec, described)


def _load_run(folder: Path, weights: str | None) -> Trained:
    config = read_config(folder)
    if config.from_hf is not None and hf.is_checkpoint(folder / "hf"):
        # The run may have moved, or the model that it started from.
        config = dataclasses.replace(config, from_hf=str(folder / "hf"))
    codec = _codec_of_run(config)
    model = build_model(config)
    state = last_state(config, folder)
    variables = state.variables()
    quantized = isinstance(model.dot_general, FallbackDot)
    model = dataclasses.replace(
        model, config=dataclasses.replace(model.config, remat="none", unroll=False)
    )
    if weights == "codes" and not quantized:
        raise ConfigError(
            f"the run in {folder} has the recipe {config.recipe}: codes take an INT8 "
            "recipe"
        )
    if weights == "floats":
        model, variables = Llama(model.config), {"params": state.params}
    elif quantized:
        frozen = freeze(model, variables, jax.ShapeDtypeStruct((1, 2), jnp.int32))
        return Trained(model, frozen, codec, f"INT8 codes ({config.recipe})")
    described = f"{jnp.dtype(model.config.dtype).name} weights"
    variables = {**variables, "params": _cast(model, variables["params"])}
    return Trained(model, variables, codec, described)


def _cast(model: Llama, params: Any) -> Any:
    """The parameters, with matrices in the dtype that the model casts them to."""

    def cast(path: tuple[Any, ...], x: Any) -> jax.Array:
        # Routers of experts stay in float32.
        is_matrix = path[-1].key in ("kernel", "embedding")
        is_matrix &= path[-2].key != "router"
        return jnp.asarray(x, model.config.dtype if is_matrix else x.dtype)

    return jax.tree.map_with_path(cast, params)


def _codec_of(folder: Path) -> TokenizerOf:
    tokenizer = hf.load_tokenizer(folder)
    if tokenizer is None:
        raise RunError(f"{folder} has no {TOKENIZER}, which turns text into tokens")
    return TokenizerOf(folder, tokenizer)


def _codec_of_run(config: Config) -> Codec:
    if config.from_hf is not None:
        return _codec_of(Path(config.from_hf))
    if config.data is None or not is_token_ids(data := Path(config.data)):
        return Bytes()
    return _codec_of(tokenizer_folder(data))
