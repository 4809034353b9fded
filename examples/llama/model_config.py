"""The sizes and numerics of a Llama."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from examples.llama import field_types
from fbq_jax import nonlinear

# The positive numbers that float32 holds with all of its digits.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)

# What a layer recomputes in the backward pass; see `LlamaConfig.remat`.
REMAT = ("none", "codes", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
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

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        field_types.check(self)
        _check_sizes(self, "original_max_position_embeddings")
        _check_at_least(self, 1, "factor")
        _check_at_least(self, _SMALLEST, "low_freq_factor", "high_freq_factor")
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
class LlamaConfig:
    """The sizes and numerics of a Llama.

    Attributes:
        vocab_size: The number of tokens in the vocabulary.
        hidden_size: The width of the residual stream.
        intermediate_size: The width of the MLP.
        num_layers: The number of layers.
        num_heads: The number of query heads.
        num_kv_heads: The number of key and value heads, a divisor of ``num_heads``.
        head_dim: The width of one head, an even number; None means
            ``hidden_size / num_heads``.
        max_seq_len: The longest sequence that the model accepts, in tokens.
        rope_theta: The base of the rotary frequencies.
        rope_scaling: How the rotary frequencies are stretched to a longer context;
            None leaves them unscaled.
        norm_eps: The constant that RMSNorm adds to the mean square.
        qkv_bias: Whether the QKV projection has a bias, as in Qwen2.
        tie_embeddings: Whether the head shares the embedding table.
        dtype: The dtype of the computation, ``jnp.bfloat16`` or ``jnp.float32``.
            Parameters are float32 in either case.
        remat: What each layer saves for the backward pass. ``"none"`` saves everything
            that the backward pass reads. ``"codes"`` saves the layer's input, the INT8
            codes of quantized operands and the packed codes of ``saved_bits``.
            ``"full"`` saves the layer's input only. The rest is recomputed.
        saved_bits: The bits per value, 4 to 12, that norms and gates save for the
            backward pass; 10 have no measurable effect on training. None leaves norms
            and gates to autodiff, which saves floats.

    Raises:
        ValueError: A field has another type or is out of range. The message names the
            field and what it accepts.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = None  # type: ignore[assignment]  # __post_init__ makes it an int
    max_seq_len: int = 8192
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tie_embeddings: bool = False
    dtype: Any = jnp.bfloat16
    remat: str = "none"
    saved_bits: int | None = None

    def __post_init__(self) -> None:
        field_types.check(self)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers")
        _check_sizes(self, *sizes, "num_heads", "num_kv_heads", "max_seq_len")
        _check_at_least(self, 1, "rope_theta")
        _check_at_least(self, _SMALLEST, "norm_eps")
        self._check_heads()
        self._check_choices()

    def _check_heads(self) -> None:
        """Checks the sizes of the heads and fills in ``head_dim``."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads takes a divisor of num_heads ({self.num_heads}), "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size takes a multiple of num_heads ({self.num_heads}) "
                    f"when head_dim is None, got {self.hidden_size}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        _check_sizes(self, "head_dim")
        if self.head_dim % 2:
            raise ValueError(
                "head_dim takes an even number (RoPE rotates pairs), "
                f"got {self.head_dim}"
            )

    def _check_choices(self) -> None:
        if self.remat not in REMAT:
            raise ValueError(
                f"remat takes one of {', '.join(REMAT)}, got {self.remat!r}"
            )
        bits = self.saved_bits
        if bits is not None and bits not in nonlinear.BITS:
            raise ValueError(
                f"saved_bits takes None or an integer from {nonlinear.BITS[0]} to "
                f"{nonlinear.BITS[-1]}, got {bits!r}"
            )
        if self.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"dtype takes jnp.bfloat16 or jnp.float32, got {self.dtype!r}"
            )


def _check_sizes(config: object, *names: str) -> None:
    for name in names:
        if not 0 < (value := getattr(config, name)) < 2**31:
            raise ValueError(f"{name} takes a positive integer of 31 bits, got {value}")


def _check_at_least(config: object, lowest: float, *names: str) -> None:
    for name in names:
        if not lowest <= (value := getattr(config, name)) <= _LARGEST:
            raise ValueError(
                f"{name} takes a number of at least {lowest:g} and at most "
                f"{_LARGEST:g}, got {value:g}"
            )
