"""How rotary frequencies are stretched to a context longer than the pretraining's.

Each scaling has a method ``scale`` and an ``attention_factor``, which multiplies the
cosines and sines.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from examples.llama import field_types
from examples.llama.field_types import SMALLEST, check_at_least, check_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All rotations are slowed down by ``factor`` (arXiv 2306.15595).

    Attributes:
        factor: The divisor of the frequencies.

    Raises:
        ValueError: A field has another type or is out of range. The message names the
            field and what it accepts.
    """

    attention_factor: ClassVar[float] = 1.0
    factor: float

    def __post_init__(self) -> None:
        field_types.check(self)
        check_at_least(self, 1, "factor")

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the scaled rotation ``frequencies``, in radians per token."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """The scaling of rotary frequencies in Llama 3.1.

    A rotation that completes many turns in the original context keeps its frequency.
    One that completes few turns is slowed down by ``factor``.

    Attributes:
        factor: The divisor of the frequencies of rotations with fewer than
            ``low_freq_factor`` turns in the original context.
        low_freq_factor: The number of turns below which ``factor`` applies in full.
        high_freq_factor: The number of turns above which a frequency is unchanged.
            Between the two bounds the scale is interpolated in the number of turns.
        original_max_position_embeddings: The length of the original context, in tokens.

    Raises:
        ValueError: A field has another type or is out of range. The message names the
            field and what it accepts.
    """

    attention_factor: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        field_types.check(self)
        check_sizes(self, "original_max_position_embeddings")
        check_at_least(self, 1, "factor")
        check_at_least(self, SMALLEST, "low_freq_factor", "high_freq_factor")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor takes a number above low_freq_factor "
                f"({self.low_freq_factor}), got {self.high_freq_factor}"
            )

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the scaled rotation ``frequencies``, in radians per token."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        transition = self.high_freq_factor - self.low_freq_factor
        unscaled = np.clip((turns - self.low_freq_factor) / transition, 0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071).

    As in `Llama3Scaling`, fast rotations keep their frequency and slow ones are divided
    by ``factor``. Between the two bounds the scale is interpolated in the channel of
    the rotation.

    Attributes:
        factor: The divisor of the frequencies of slow rotations.
        original_max_position_embeddings: The length of the original context, in tokens.
        attention_factor: Multiplies the cosines and sines, so the scores of attention
            are multiplied by its square; None means ``0.1 * log(factor) + 1``.
        beta_fast: The number of turns in the original context above which a frequency
            is unchanged.
        beta_slow: The number of turns below which ``factor`` applies in full.
        truncate: Whether the interpolation begins and ends at whole channels.

    Raises:
        ValueError: A field has another type or is out of range. The message names the
            field and what it accepts.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float = None  # type: ignore[assignment]  # __post_init__ sets it
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        field_types.check(self)
        check_sizes(self, "original_max_position_embeddings")
        check_at_least(self, 1, "factor")
        if self.attention_factor is None:
            factor = 0.1 * math.log(self.factor) + 1
            object.__setattr__(self, "attention_factor", factor)
        check_at_least(self, SMALLEST, "attention_factor", "beta_fast", "beta_slow")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast takes a number of at least beta_slow ({self.beta_slow}), "
                f"got {self.beta_fast}"
            )

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the scaled rotation ``frequencies``, in radians per token.

        Args:
            frequencies: At least two, in a falling geometric sequence from 1.
        """
        first = self._channel(self.beta_fast, frequencies)
        last = self._channel(self.beta_slow, frequencies)
        if self.truncate:
            first, last = np.floor(first), np.ceil(last)
        # The upper limit is that of transformers: twice the number of frequencies.
        first, last = max(first, 0.0), min(last, 2 * frequencies.size - 1.0)
        if first == last:
            last += 0.001
        channels = np.arange(frequencies.size)
        slowed = np.clip((channels - first) / (last - first), 0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def _channel(self, turns: float, frequencies: np.ndarray) -> float:
        """The channel, with a fraction, whose rotation completes this many turns."""
        frequency = 2 * np.pi * turns / self.original_max_position_embeddings
        return float(np.log(frequency) / np.log(frequencies[1]))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
