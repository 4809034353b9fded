"""The models under study, and the text that they read."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.llama import hf
from examples.llama.data import batches, load_corpus
from examples.llama.model_config import LlamaConfig
from examples.llama.step import PyTree
from experiments.settings import Experiment
from experiments.studies.operands import Operands, operands


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model in float32, and held-out text."""

    config: LlamaConfig
    params: PyTree
    text: Sequence[np.ndarray]  # batches of tokens, int32 [B, S+1] each

    @functools.cached_property
    def operands(self) -> dict[str, Operands]:
        """The operands of the projections on the first batch."""
        return operands(self.config, self.params, jnp.asarray(self.text[0]))


def load(experiment: Experiment, model: str) -> Subject:
    """Loads one of `Settings.models`."""
    settings = experiment.settings
    config, params = hf.load(experiment.model(model))
    config = dataclasses.replace(config, dtype=jnp.float32)
    corpus = load_corpus(experiment.text("python"))
    seq = settings.pretrain["seq"]
    text = batches(corpus, "val", seq=seq, batch=settings.studied, seed=0)
    return Subject(config, jax.device_put(params), text)


@jax.jit
def cosine_distance(a: PyTree, b: PyTree) -> jax.Array:
    """Returns 1 - cosine similarity of two arrays, or of two pytrees as vectors.

    The distance is 1 if either is zero. It is computed as half the squared distance of
    the directions, because 1 - cosine has no significant digits below 1e-7.
    """

    def direction(tree: PyTree) -> tuple[jax.Array, PyTree]:
        tree = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
        norm = optax.tree.norm(tree)
        return norm, jax.tree.map(lambda x: x / norm, tree)

    (norm_a, a), (norm_b, b) = direction(a), direction(b)
    distance = optax.tree.norm(optax.tree.sub(a, b), squared=True) / 2
    return jnp.where(jnp.minimum(norm_a, norm_b) > 0, distance, 1.0)
