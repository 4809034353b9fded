"""Loads a trained model to run it: from the folder of a run, or of a checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.llama import hf
from examples.llama.build import build_model
from examples.llama.config import ConfigError
from examples.llama.model import Llama
from examples.llama.run_folder import RunError, has_run, read_config
from examples.llama.text import Codec, TokenizerOf, codec_of_run
from examples.llama.training import last_state
from fbq_jax import FallbackDot, freeze

WEIGHTS = ("codes", "floats")


class Trained(NamedTuple):
    """A trained model, its variables and codec, and what it multiplies by, in words."""

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

    Raises one of `generate.ERRORS`, or ValueError if ``freeze`` fails.
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
    name, codec = hf.quantization(folder), TokenizerOf(folder)
    config, params = hf.load(folder)
    source = "" if name is None else f", from {name}"
    return _in_floats(Llama(config), {"params": params}, codec, source)


def _load_run(folder: Path, weights: str | None) -> Trained:
    config = read_config(folder)
    if config.from_hf is not None and hf.is_checkpoint(folder / "hf"):
        # The run may have moved, or the model that it started from.
        config = dataclasses.replace(config, from_hf=str(folder / "hf"))
    codec, model = codec_of_run(config), build_model(config)
    quantized = isinstance(model.dot_general, FallbackDot)
    if weights == "codes" and not quantized:
        raise ConfigError(
            f"the run in {folder} has the recipe {config.recipe}: codes take an INT8 "
            "recipe"
        )
    state = last_state(config, folder)
    sizes = dataclasses.replace(model.config, remat="none", unroll=False)
    if weights == "floats":
        return _in_floats(Llama(sizes), {"params": state.params}, codec)
    model = Llama(sizes, model.dot_general)
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
        # Routers of experts stay in float32.
        is_matrix = path[-1].key in ("kernel", "embedding")
        is_matrix &= path[-2].key != "router"
        return jnp.asarray(x, dtype if is_matrix else x.dtype)

    params = jax.tree.map_with_path(cast, variables["params"])
    described = f"{dtype.name} weights{source}"
    return Trained(model, {**variables, "params": params}, codec, described)
