"""The models that are studied, and the text that they read."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama import hf
from examples.llama.data import batches, load_corpus
from examples.llama.experiments import outliers
from examples.llama.experiments.probe import Operands, operands
from examples.llama.experiments.settings import Settings
from examples.llama.model import LlamaConfig
from examples.llama.step import PyTree


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and held-out text.

    Attributes:
        name: "trained", or the largest activation that was planted.
        config: The model's sizes; float32.
        params: Its parameters.
        text: Batches of tokens, int32 [B, S+1].
    """

    name: str
    config: LlamaConfig
    params: PyTree
    text: Sequence[np.ndarray]

    @functools.cached_property
    def operands(self) -> dict[str, Operands]:
        """What the projections multiply, as the first batch is read."""
        return operands(self.config, self.params, jnp.asarray(self.text[0]))


def load(settings: Settings, work: Path, name: str) -> Subject:
    """Reads one of `outliers.models`."""
    config, params = hf.load(outliers.models(settings, work)[name])
    config = dataclasses.replace(config, dtype=jnp.float32)
    corpus = load_corpus(work / "corpus" / "python")
    seq = settings.pretrain["seq"]
    text = batches(corpus, "val", seq=seq, batch=settings.studied, seed=0)
    return Subject(name, config, jax.device_put(params), text)


def cosine(a: PyTree, b: PyTree) -> jax.Array:
    """The cosine similarity of arrays, or of all arrays of two pytrees together.

    It is 0 where one of them is: all of it was rounded off.
    """

    def dot(a: PyTree, b: PyTree) -> jax.Array:
        products = jax.tree.map(lambda x, y: jnp.vdot(x, y), a, b)
        return jnp.sum(jnp.stack(jax.tree.leaves(products)))

    a, b = (jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (a, b))
    norms = jnp.sqrt(dot(a, a)) * jnp.sqrt(dot(b, b))
    return dot(a, b) / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny)
