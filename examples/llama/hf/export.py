"""Exports a trained model to a folder that a serving engine loads."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

import fbq_jax
from examples.llama.hf import gguf_file
from examples.llama.hf.checkpoint import config_json, save, write_folder
from examples.llama.hf.families import Family
from examples.llama.hf.files import Folder, check_new, new_folder
from examples.llama.hf.tensor_views import ROUTER, parameter_shapes, tensor_views
from examples.llama.model import Llama
from examples.llama.projections import fuses
from fbq_jax import export as codes_of
from fbq_jax.export import BlockWeight, ExportError, frozen_weights

# Those of INT8 codes, and a checkpoint in floats.
FORMATS = (*codes_of.FORMATS, "hf")
# Fused layers join gate and up in turns of this many columns.
_TURN = 128
_TOKENS = jax.ShapeDtypeStruct((1, 2), jnp.int32)


def check_exportable(name: str, model: Llama, *, like: Folder | None = None) -> None:
    """Checks, before a model is trained, that `export` takes it.

    Raises ExportError, or CheckpointError if no family has the model's settings.
    """
    if name not in FORMATS:
        raise ExportError(f"export takes one of {', '.join(FORMATS)}, got {name!r}")
    _, family = config_json(model.config, like)
    if name == "hf":
        return
    if not isinstance(model.dot_general, fbq_jax.FallbackDot):
        raise ExportError(
            f"{name} stores INT8 codes: export takes a model with an INT8 recipe"
        )
    if model.config.invariant or model.config.quantize_head:
        raise ExportError(
            f"{name} has no INT8 head, which this model has: export takes hf"
        )
    if name == "gguf":
        gguf_file.check(model.config, family, like)
    # One layer stands for all, and a number for each scale shows how blocks lie.
    layers: dict[str, Any] = {"nope_layers": (), "sliding_layers": None}
    one = dataclasses.replace(model.config, num_layers=1, **layers)
    one_layer = Llama(one, model.dot_general)

    def frozen() -> dict[str, Any]:
        tokens = jnp.zeros(_TOKENS.shape, _TOKENS.dtype)
        variables = one_layer.init(jax.random.key(0), tokens)
        return fbq_jax.freeze(one_layer, variables, _TOKENS)

    def numbered(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if x.dtype == jnp.int8:  # codes
            return np.zeros(x.shape, x.dtype)
        return (1 + np.arange(x.size, dtype=x.dtype) / x.size).reshape(x.shape)

    variables = jax.tree.map(numbered, jax.eval_shape(frozen))
    weights = _weights(one_layer, family, variables)
    codes_of.FORMATS[name](weights, np.dtype(one.dtype))


def export(
    folder: Folder,
    name: str,
    model: Llama,
    variables: Mapping[str, Any],
    *,
    like: Folder | None = None,
) -> None:
    """Writes a model in one of the `FORMATS`; ``like`` is as in `save`.

    The format "hf" is that of `save`, in float32. The others have the INT8 codes that
    the model multiplies by, and other parameters in ``model.config.dtype``; their
    ``variables`` are those before or after ``fbq_jax.freeze``. The format "gguf" writes
    the file model-Q8_0.gguf, every other one a checkpoint of transformers.
    """
    folder, config = Path(folder), model.config
    check_new(folder)
    check_exportable(name, model, like=like)
    if name == "hf":
        save(folder, config, variables["params"], like=like)
        return
    stored, family = config_json(config, like)
    if len(_arrays(variables)) == len(parameter_shapes(config)):
        variables = fbq_jax.freeze(model, variables, _TOKENS)
    dtype = np.dtype(config.dtype)
    weights = _weights(model, family, variables)
    tensors, quantization = codes_of.FORMATS[name](weights, dtype)
    floats = {path: np.asarray(x) for path, x in _arrays(variables).items()}
    views = tensor_views(config, family, floats)
    others = {tensor: view.join() for tensor, view in views.items()}
    if name == "gguf":
        with new_folder(folder) as part:
            file = part / "model-Q8_0.gguf"
            gguf_file.write(file, config, family, tensors, others, like)
        return
    if "ignore" in quantization and config.num_experts is not None:
        (router,) = family.tensors_of(ROUTER)  # is not quantized
        routers = (router.format(layer) for layer in range(config.num_layers))
        quantization["ignore"] += [name.removesuffix(".weight") for name in routers]
    tensors |= {tensor: array.astype(dtype) for tensor, array in others.items()}
    stored |= {"torch_dtype": dtype.name, "quantization_config": quantization}
    write_folder(folder, stored, tensors, like)


def _arrays(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by path, without those that are frozen."""
    flat = flax.traverse_util.flatten_dict(dict(variables["params"]), sep="/")
    return {path: leaf for path, leaf in flat.items() if jax.tree.leaves(leaf)}


def _weights(model: Llama, family: Family, variables: Any) -> dict[str, BlockWeight]:
    """The weights of frozen projections by the names of their tensors."""
    weights = {}
    for path, weight in frozen_weights(variables).items():
        codes, scales = weight.codes, weight.scales
        in_turns = path == "layers/mlp/gate_up/kernel"
        if in_turns and fuses(model.config, model.dot_general):
            codes, scales = _gate_then_up(codes), _gate_then_up(scales)
        # A kernel has its outputs in the last axis.
        codes_by_name, scales_by_name = (
            tensor_views(model.config, family, {path: x.mT}) for x in (codes, scales)
        )
        for tensor, view in codes_by_name.items():
            parts = tuple(math.prod(part.shape[:-1]) for part in view.parts)
            weights[tensor] = BlockWeight(
                view.join(), scales_by_name[tensor].join(), weight.group, parts
            )
    return weights


def _gate_then_up(rows: np.ndarray) -> np.ndarray:
    """Rows of gate and up, which a fused layer has in turns, one after the other."""
    layers, size, columns = rows.shape
    if size % (2 * _TURN):
        return rows
    turns = rows.reshape(layers, -1, 2, _TURN, columns)
    return turns.swapaxes(1, 2).reshape(layers, size, columns)
