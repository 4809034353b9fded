"""The Llama of ``examples/llama``, for the benchmarks of a block and of a step."""

from typing import Any

import jax

import fbq_jax.recipes
from fbq_jax.recipe import Recipe

try:
    from examples.llama import model, step
    from examples.llama.config import Config
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"there is no {error.name}, and blocks and training are measured with the "
        "repository's Llama: run this in a checkout, after "
        "pip install -e '.[cuda,examples]'",
        name=error.name,
    ) from error

_HEAD = 128  # channels of a head
_GROUP = 4  # query heads that share keys and values
_SAVED_BITS = 10


def recipes() -> dict[str, Recipe | None]:
    """bf16, and every recipe, by name."""
    named = vars(fbq_jax.recipes).items()
    return {"bf16": None} | {name: r for name, r in named if isinstance(r, Recipe)}


def config(
    hidden: int,
    intermediate: int,
    sequence: int,
    *,
    layers: int = 1,
    vocabulary: int = 1,
    quantized: bool,
) -> model.LlamaConfig:
    """Grouped-query attention with heads of 128 channels; INT10 saved if quantized."""
    heads = hidden // _HEAD
    return model.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // _GROUP),
        max_seq_len=sequence,
        saved_bits=_SAVED_BITS if quantized else None,
    )


def layer(
    config: model.LlamaConfig, dot_general: Any
) -> tuple[model.Layer, tuple[jax.Array, jax.Array]]:
    """A layer, and the tables of its rotations."""
    tables = model.rotary_tables(config, config.max_seq_len)
    return model.Layer(config, dot_general), tables


def trainer(config: model.LlamaConfig, dot_general: Any) -> tuple[step.TrainState, Any]:
    """A model's state before its first step, and its jitted step, as train.py's."""
    llama = model.Llama(config, dot_general)
    optimizer, schedule = step.make_optimizer(Config(steps=1000))
    state = step.init_state(llama, optimizer, None, seed=0)
    return state, step.make_train_step(llama, optimizer, schedule)


def weights(params: Any) -> int:
    """How many weights multiply each token: those of all dense layers."""
    leaves = jax.tree.leaves_with_path(params)
    return sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")


def work(weights: int, layers: int, tokens: int, sequence: int, hidden: int) -> float:
    """Operations of a forward and backward pass (as in arXiv 2204.02311, appendix B).

    Six for each weight and token; and in each layer twelve for each channel and each
    token that a token attends to, which causal attention makes half the sequence.
    """
    return 6.0 * tokens * (weights + layers * hidden * sequence)
