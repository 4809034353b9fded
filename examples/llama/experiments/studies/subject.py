"""The models under study, and the text that they read."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.llama import hf
from examples.llama.data import batches, load_corpus
from examples.llama.experiments import outliers
from examples.llama.experiments.probe import Operands, operands
from examples.llama.experiments.settings import Settings
from examples.llama.model_config import LlamaConfig
from examples.llama.step import PyTree


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and held-out text.

    Attributes:
        name: "trained", or the largest planted activation.
        config: The configuration of the model, in float32.
        params: The parameters of the model.
        text: Batches of tokens, int32 [B, S+1] each.
    """

    name: str
    config: LlamaConfig
    params: PyTree
    text: Sequence[np.ndarray]

    @functools.cached_property
    def operands(self) -> dict[str, Operands]:
        """The operands of the projections on the first batch."""
        return operands(self.config, self.params, jnp.asarray(self.text[0]))


def load(settings: Settings, work: Path, name: str) -> Subject:
    """Loads one of `outliers.models`."""
    config, params = hf.load(outliers.models(settings, work)[name])
    config = dataclasses.replace(config, dtype=jnp.float32)
    corpus = load_corpus(work / "corpus" / "python")
    seq = settings.pretrain["seq"]
    text = batches(corpus, "val", seq=seq, batch=settings.studied, seed=0)
    return Subject(name, config, jax.device_put(params), text)


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
