"""Rotary position embeddings (RoPE), and how they are stretched to a longer context."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama import fields
from examples.llama.errors import UserError
from examples.llama.fields import FromOne, Positive, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All rotations are slowed down by ``factor`` (arXiv 2306.15595)."""

    factor: FromOne

    def __post_init__(self) -> None:
        fields.check(self)

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the scaled rotation frequencies, in radians per token."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """The scaling of Llama 3.1.

    Rotations of more than ``high_freq_factor`` turns in the original context keep their
    frequency, those of fewer than ``low_freq_factor`` are slowed down by ``factor``. In
    between, the scale is interpolated in the number of turns.
    """

    factor: FromOne
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size

    def __post_init__(self) -> None:
        fields.check(self)
        if self.high_freq_factor <= self.low_freq_factor:
            got = (
                f"low_freq_factor ({self.low_freq_factor}), got {self.high_freq_factor}"
            )
            raise UserError(f"high_freq_factor takes a number above {got}")

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the scaled rotation frequencies, in radians per token."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        transition = self.high_freq_factor - self.low_freq_factor
        unscaled = np.clip((turns - self.low_freq_factor) / transition, 0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071).

    It is like `Llama3Scaling` with ``beta_fast`` and ``beta_slow`` turns, interpolated
    in the channel, from whole channels if ``truncate`` is true. ``attention_factor``
    multiplies cosines and sines; None means ``0.1 * log(factor) + 1``.
    """

    factor: FromOne
    original_max_position_embeddings: Size
    attention_factor: Positive = None  # type: ignore[assignment]  # becomes a float
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        fields.check(self)
        if self.attention_factor is None:
            factor = 0.1 * math.log(self.factor) + 1
            object.__setattr__(self, "attention_factor", factor)
        if self.beta_fast < self.beta_slow:
            slow, fast = self.beta_slow, self.beta_fast
            raise UserError(
                f"beta_fast takes a number of at least beta_slow ({slow}), got {fast}"
            )

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns scaled frequencies; they fall geometrically from 1."""
        turns = np.array([self.beta_fast, self.beta_slow])
        limits = 2 * np.pi * turns / self.original_max_position_embeddings
        first, last = np.log(limits) / np.log(frequencies[1])
        if self.truncate:
            first, last = np.floor(first), np.ceil(last)
        # The upper limit is that of transformers: twice the number of frequencies.
        first, last = max(first, 0.0), min(last, 2 * frequencies.size - 1.0)
        if first == last:
            last += 0.001
        channels = np.arange(frequencies.size)
        slowed = np.clip((channels - first) / (last - first), 0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


class Rope(NamedTuple):
    """A rotation: the base of its frequencies, and their scaling."""

    theta: float
    scaling: RopeScaling | None


Tables = tuple[jax.Array, jax.Array]  # cosines and sines


def rotary_tables(ropes: Sequence[Rope | None], head_dim: int, seq_len: int) -> Tables:
    """Computes the cosines and sines of the rotary angles of positions, as constants.

    Both are float32 [ropes, seq_len, 1, head_dim / 2]. The angles of None are 0.
    """
    frequencies, factors = [], []
    for rope in ropes:
        frequency, factor = np.zeros(head_dim // 2), 1.0
        if rope is not None:
            frequency = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
            if rope.scaling is not None:
                frequency = rope.scaling.scale(frequency)
                factor = getattr(rope.scaling, "attention_factor", 1.0)
        frequencies.append(frequency)
        factors.append(factor)
    turned = np.array(frequencies, np.float32)[:, None, None]
    angles = np.arange(seq_len, dtype=np.float32)[:, None, None] * turned
    scales = np.array(factors)[:, None, None, None]
    return tuple(jnp.float32(f(np.float64(angles)) * scales) for f in (np.cos, np.sin))


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """Rotates each head, [B, S, heads, head_dim], by its position, in float32.

    Channel i is paired with channel i + head_dim / 2.
    """
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
