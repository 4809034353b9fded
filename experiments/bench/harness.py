"""What the benchmarks share: the example's model and training step, at any size."""

import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama import flops, mesh, step
from examples.llama.config import SAVED_BITS, Config
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from experiments.bench import memory
from fbq_jax import FallbackDot, Recipe
from fbq_jax.bench import layers, matmuls, measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.recipes import NAMED

SEQUENCE = 2048  # tokens
VOCABULARY = 32_000  # of the trained models
ONE_DEVICE = "one device"  # the mesh's name in results
_HEAD_DIM = 128
_QUERIES_PER_KV_HEAD = 4
# A model would learn a repeated batch by heart. Its gradients would vanish, and a GPU
# multiplies zeros with less power. This learning rate changes nothing.
_NO_LEARNING = 1e-6


def recipes() -> dict[str, Recipe | None]:
    """The recipes to measure by name; None is bf16, the baseline."""
    return {"bf16": None} | {name: NAMED[name] for name in matmuls.TIMED}


def dot_general(recipe: Recipe | None, implementation: str | None) -> tuple[str, Any]:
    """The backend and the ``dot_general`` of a recipe; None is bf16 by XLA."""
    if recipe is None:
        return "xla", None
    backend = matmuls.forward_choice(recipe, implementation).backend
    return backend, FallbackDot(recipe, implementation=implementation)


def config(
    hidden: int, intermediate: int, sequence: int, *, quantized: bool, **options: Any
) -> LlamaConfig:
    """Grouped-query attention with heads of 128 channels; INT10 saved if quantized."""
    heads = hidden // _HEAD_DIM
    sizes = {"num_layers": 1, "vocab_size": 1} | options
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=max(1, heads // _QUERIES_PER_KV_HEAD),
        max_seq_len=sequence,
        saved_bits=SAVED_BITS if quantized else None,
        **sizes,
    )


def trainer(
    config: LlamaConfig,
    dot_general: Any,
    *,
    learns: bool = False,
    keeps_codes: bool = False,
) -> tuple[step.TrainState, Any]:
    """The initial training state of a model and its jitted training step.

    The learning rate is the example's, or too small to matter. The optimizer may write
    the codes of weights, which are then in the state.
    """
    llama = Llama(config, dot_general)
    rate = Config.lr if learns else _NO_LEARNING
    options = Config(steps=1000, lr=rate, optimizer_codes=keeps_codes)
    optimizer, schedule = step.make_optimizer(options)
    state = step.init_state(llama, optimizer, None, seed=0)
    state = step.add_codes(llama, optimizer, state)
    return state, step.make_train_step(llama, optimizer, schedule)


class Program(NamedTuple):
    """A training step to measure; ``name`` is its recipe's.

    The shape is ``(hidden, intermediate, layers, sequences of a microbatch)`` and, if
    there are several, the microbatches; the mesh is as in ``--mesh`` of the trainer.
    If it keeps codes, the optimizer writes them.
    """

    name: str
    recipe: Recipe | None
    shape: tuple[int, ...]
    mesh: str = ""
    unroll: bool = False
    keeps_codes: bool = False
    invariant: bool = False

    def row_name(self) -> str:
        """The name of the row."""
        name = layers.name_with_codes(self.name) if self.keeps_codes else self.name
        name = f"{name}, invariant" if self.invariant else name
        return f"{name}, unrolled" if self.unroll else name

    def llama(self) -> LlamaConfig:
        """The model's configuration."""
        hidden, intermediate, depth, *_ = self.shape
        return config(
            hidden,
            intermediate,
            self.batch()[-1],
            num_layers=depth,
            vocab_size=VOCABULARY,
            quantized=self.recipe is not None,
            unroll=self.unroll,
            invariant=self.invariant,
        )

    def batch(self) -> tuple[int, int, int]:
        """The microbatches, their sequences, and the tokens of a sequence."""
        hidden, _, _, sequences, *microbatches = self.shape
        return microbatches[0] if microbatches else 1, sequences, min(SEQUENCE, hidden)


def train(
    program: Program, implementation: str | None, *, steps: int, effort: Effort
) -> tuple[Row, dict[str, Any]]:
    """Takes training steps on one random batch, then times further steps.

    The model is freed on return, since the next one may need its memory. Returns the
    row of a step, and the metrics of the last step before timing.
    """
    microbatches, sequences, length = program.batch()
    backend, product = dot_general(program.recipe, implementation)
    llama = program.llama()
    with devices(program.mesh):
        size = (microbatches, sequences, length + 1)
        draw = np.random.default_rng(0).integers
        tokens = distribute(draw(0, VOCABULARY, size, np.int32))
        state, step = trainer(llama, product, keeps_codes=program.keeps_codes)
        compiled, compile_s, (state, _) = measure.first_call(step, state, tokens)
        for _ in range(steps):
            state, metrics = compiled(state, tokens)
        fallback = mean_rate({"fallback": state.fallback})
        metrics = jax.device_get(metrics)
        timing = measure.step_timing(compiled, state, tokens, effort=effort)
    measured = row(
        timing,
        work(llama, math.prod(program.batch())),
        what=program.row_name(),
        implementation=backend,
        shape=program.shape,
        fallback=fallback,
        compile_s=compile_s,
        peak_bytes=memory.peak_bytes(compiled),
    )
    return measured, metrics


def devices(text: str) -> AbstractContextManager[Any]:
    """A context that runs on the mesh that ``--mesh`` of the training command makes."""
    return mesh.use(mesh.make(text))


def distribute(tokens: np.ndarray) -> jax.Array:
    """Puts a step's tokens ``[N, B/N, S+1]`` on the mesh in use."""
    return jnp.asarray(mesh.distribute(tokens, None, "batch", None))


def work(config: LlamaConfig, tokens: int) -> float:
    """Operations of a step: the matrix products, and causal attention."""
    return float(tokens * flops.per_token(config, config.max_seq_len))
