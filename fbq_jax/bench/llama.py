"""The Llama of ``examples/llama``, for the benchmarks of a block and of a step."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.bench import measure, memory
from fbq_jax.bench.contenders import timed_recipes
from fbq_jax.bench.measure import Effort, Timing
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.recipes.schema import Recipe

try:
    from examples.llama import flops, mesh, model, step
    from examples.llama.config import Config
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"there is no {error.name}, and blocks and training are measured with the "
        "repository's Llama: run this in a checkout, after "
        "pip install -e '.[cuda,examples]'",
        name=error.name,
    ) from error

VOCABULARY = 32_000  # of the models that are trained
_HEAD = 128  # channels of a head
_GROUP = 4  # query heads that share keys and values
_SAVED_BITS = 10
# A batch that is the same in each step would be learned by heart, and the gradients
# that are timed go to zero, which a GPU multiplies with less power.
_STANDING_STILL = 1e-6


def recipes() -> dict[str, Recipe | None]:
    """bf16, and what is timed beside it, by name."""
    return {"bf16": None} | timed_recipes()


def config(
    hidden: int,
    intermediate: int,
    sequence: int,
    *,
    layers: int = 1,
    vocabulary: int = 1,
    quantized: bool,
    remat: str = "none",
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
        remat=remat,
    )


def layer(
    config: model.LlamaConfig, dot_general: Any
) -> tuple[model.Layer, tuple[jax.Array, jax.Array]]:
    """A layer, and the tables of its rotations."""
    tables = model.rotary_tables(config, config.max_seq_len)
    return model.remat_layer(config)(config, dot_general), tables


def trainer(
    config: model.LlamaConfig, dot_general: Any, *, learns: bool = False
) -> tuple[step.TrainState, Any]:
    """A model's state before its first step, and its jitted step, as train.py's.

    Its learning rate is train.py's if it ``learns``, and else too small to.
    """
    llama = model.Llama(config, dot_general)
    rate = Config.lr if learns else _STANDING_STILL
    optimizer, schedule = step.make_optimizer(Config(steps=1000, lr=rate))
    state = step.init_state(llama, optimizer, None, seed=0)
    return state, step.make_train_step(llama, optimizer, schedule)


class Trained(NamedTuple):
    """What ``train`` found.

    Attributes:
      metrics: of the last step before any was timed.
      fallback: the share of blocks that fell back in it; None where none can.
      timing: of a step.
      compile_s: seconds of the first call, compilation included.
      peak_bytes: as in ``results.Row``.
    """

    metrics: dict[str, Any]
    fallback: float | None
    timing: Timing
    compile_s: float
    peak_bytes: int


def train(
    config: model.LlamaConfig,
    dot_general: Any,
    tokens: jax.Array,
    *,
    steps: int,
    effort: Effort,
) -> Trained:
    """Takes some steps, always on these tokens, and times those that follow.

    Nothing of the model is left in memory, where the next one may need the room.
    """
    state, step = trainer(config, dot_general)
    compiled, compile_s, state = measure.first_step(step, state, tokens)
    for _ in range(steps):
        state, metrics = compiled(state, tokens)
    rate = mean_rate({"fallback": state.fallback})
    timing, _ = measure.loop(compiled, state, tokens, effort=effort)
    metrics = jax.device_get(metrics)
    return Trained(metrics, rate, timing, compile_s, memory.peak_bytes(compiled))


def devices(text: str) -> AbstractContextManager[Any]:
    """Has what follows run on the mesh that train.py's ``--mesh`` would make."""
    return mesh.use(mesh.make(text))


def random_tokens(sequences: int, length: int) -> np.ndarray:
    """A step's tokens, int32 ``[1, sequences, length + 1]``, each time the same."""
    shape = (1, sequences, length + 1)
    return np.random.default_rng(0).integers(0, VOCABULARY, shape, np.int32)


def distribute(tokens: np.ndarray) -> jax.Array:
    """Puts a step's tokens ``[N, B/N, S+1]`` on the mesh in use."""
    return jnp.asarray(mesh.distribute(tokens, None, "batch", None))


def work(config: model.LlamaConfig, tokens: int) -> float:
    """Operations of the layers' forward and backward passes, and of the head's.

    In sequences of the longest that there are.
    """
    return float(tokens * flops.per_token(config, config.max_seq_len))
