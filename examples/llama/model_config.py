"""The sizes, the variants and the numerics of a Llama."""

import dataclasses
import reprlib
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp

from examples.llama import fields
from examples.llama.fields import FromOne, FromZero, Positive, Range, Size
from examples.llama.rope_scaling import RopeScaling, YarnScaling
from fbq_jax import Routing, nonlinear

SavedBits = Annotated[int, Range(int, nonlinear.BITS[0], nonlinear.BITS[-1])]
# What a layer recomputes in the backward pass; see `LlamaConfig.remat`.
Remat = Literal["none", "codes", "full"]


class Rope(NamedTuple):
    """A rotation: the base of its frequencies, and their scaling."""

    theta: float
    scaling: RopeScaling | None


class LayerKind(NamedTuple):
    """What differs between the layers of one model.

    A query sees `window` keys, up to and including its own; None stands for all.
    Without a `rope`, queries and keys are not rotated.
    """

    window: int | None
    rope: Rope | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes and numerics of a Llama.

    Attributes:
        vocab_size: The number of tokens in the vocabulary.
        hidden_size: The width of the residual stream.
        intermediate_size: The width of the MLP; of each expert, if there are experts.
        num_layers: The number of layers.
        num_heads: The number of query heads.
        num_kv_heads: The number of key and value heads, a divisor of ``num_heads``.
        head_dim: The width of one head, an even number; None means
            ``hidden_size / num_heads``.
        max_seq_len: The longest sequence that the model accepts, in tokens.
        rope_theta: The base of the rotary frequencies.
        rope_scaling: How the rotary frequencies are stretched to a longer context.
        local_rope_theta: The base of the rotary frequencies, unscaled, in the layers
            with a sliding window; None means those of all layers.
        nope_layers: The layers that do not rotate queries and keys.
        sliding_window: The keys that a query sees, up to and including its own, in
            ``sliding_layers``; None stands for all of them.
        sliding_layers: The layers with a sliding window; None means every layer.
        norm_eps: The constant that RMSNorm adds to the mean square.
        unit_offset_norms: Whether norms multiply by ``1 + scale`` instead of ``scale``.
        post_norms: Whether norms also follow attention and the MLP, before the skip
            connection.
        qk_norm: Whether queries and keys are normalized, each head by itself.
        qkv_bias: Whether the QKV projection has a bias.
        query_pre_attn_scalar: Attention's scores are divided by its square root; None
            means ``head_dim``.
        attn_softcap: Scores become ``cap * tanh(score / cap)``; None leaves them.
        logit_softcap: The same for the logits.
        activation: The function that the MLP applies to its gate: ``"silu"`` or
            ``"gelu_tanh"``, the tanh approximation of GELU.
        num_experts: The experts that take the place of each MLP; None for one MLP.
        top_k: The experts of each token.
        renormalize: Whether the weights of a token's experts are divided by their sum.
        router_aux_loss_coef: The weight in training of the loss that balances the
            experts of a layer, ``num_experts * sum(f * p)``. As transformers counts it,
            f is the share of the tokens that select an expert, and sums to ``top_k``; p
            is the expert's mean probability.
        embed_scale: Multiplies the embeddings that enter the first layer.
        tie_embeddings: Whether the head shares the embedding table.
        dtype: The dtype of the computation, ``jnp.bfloat16`` or ``jnp.float32``.
            Parameters are float32 in either case.
        remat: What each layer saves for the backward pass. ``"none"`` saves everything
            that the backward pass reads. ``"codes"`` saves the layer's input, the INT8
            codes of quantized operands and the packed codes of ``saved_bits``.
            ``"full"`` saves the layer's input only. The rest is recomputed.
        unroll: Whether each layer is compiled by itself. A loop over the layers takes
            less time to compile, but copies what a layer saves into a stack, and in the
            backward pass out of it.
        saved_bits: The bits per value that norms and gates save for the backward pass;
            10 have no measurable effect on training. None saves autodiff's floats.

    Raises:
        ValueError: A field has another type or is out of range. The message names the
            field and what it accepts.
    """

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size = None  # type: ignore[assignment]  # __post_init__ makes it an int
    max_seq_len: Size = 8192
    rope_theta: FromOne = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: FromOne | None = None
    nope_layers: tuple[int, ...] = ()
    sliding_window: Size | None = None
    sliding_layers: tuple[int, ...] | None = None
    norm_eps: Positive = 1e-5
    unit_offset_norms: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    query_pre_attn_scalar: Positive | None = None
    attn_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    num_experts: Size | None = None
    top_k: Size = 2
    renormalize: bool = True
    router_aux_loss_coef: FromZero = 0.01
    embed_scale: Positive = 1.0
    tie_embeddings: bool = False
    dtype: Any = jnp.bfloat16
    remat: Remat = "none"
    unroll: bool = False
    saved_bits: SavedBits | None = None

    def __post_init__(self) -> None:
        fields.check(self)
        self._check_divides("num_kv_heads", "num_heads")
        if self.head_dim is None:
            self._check_divides("num_heads", "hidden_size")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        self._check_attention()
        if self.num_experts is not None:
            self._check_experts(self.num_experts)
        if self.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"dtype takes jnp.bfloat16 or jnp.float32, got {self.dtype!r}"
            )

    def score_scale(self) -> float:
        """Returns what attention multiplies its scores by."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def routing(self) -> Routing | None:
        """Returns how tokens get their experts; None without experts."""
        if self.num_experts is None:
            return None
        return Routing(self.num_experts, self.top_k, renormalize=self.renormalize)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kind of each layer in turn."""
        rope = local = Rope(self.rope_theta, self.rope_scaling)
        if self.local_rope_theta is not None:
            local = Rope(self.local_rope_theta, None)
        layers = range(self.num_layers)
        sliding = layers if self.sliding_layers is None else self.sliding_layers
        if self.sliding_window is None:
            sliding = ()
        return tuple(
            LayerKind(
                self.sliding_window if layer in sliding else None,
                None
                if layer in self.nope_layers
                else local
                if layer in sliding
                else rope,
            )
            for layer in layers
        )

    def distinct_kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kinds that some layer has, in the order of the first layers."""
        return tuple(dict.fromkeys(self.layer_kinds()))

    def _check_divides(self, name: str, other: str) -> None:
        divisor, number = getattr(self, name), getattr(self, other)
        if number % divisor:
            raise ValueError(
                f"{name} takes a divisor of {other} ({number}), got {divisor}"
            )

    def _check_attention(self) -> None:
        if self.head_dim % 2:
            raise ValueError(
                "head_dim takes an even number (RoPE rotates pairs), "
                f"got {self.head_dim}"
            )
        for name in ("nope_layers", "sliding_layers"):
            layers = getattr(self, name) or ()
            if any(not 0 <= layer < self.num_layers for layer in layers):
                raise ValueError(
                    f"{name} takes indices of the {self.num_layers} layers, "
                    f"got {reprlib.repr(layers)}"
                )
        if self.sliding_window is None and self.sliding_layers:
            raise ValueError("sliding_window takes an integer with sliding_layers")
        yarn = isinstance(self.rope_scaling, YarnScaling)
        if yarn and (self.rope_theta == 1 or self.head_dim == 2):
            raise ValueError(
                "YaRN takes a rope_theta above 1 and a head_dim above 2, got "
                f"{self.rope_theta:g} and {self.head_dim}"
            )

    def _check_experts(self, num_experts: int) -> None:
        if self.top_k > num_experts:
            raise ValueError(
                f"top_k takes at most num_experts ({num_experts}), got {self.top_k}"
            )
        if self.renormalize and self.top_k == 1:
            raise ValueError(
                "renormalize takes False with a top_k of 1: the weight of the only "
                "expert would always be 1, and the router would have no gradient"
            )
        if self.activation != "silu":
            raise ValueError(
                f"activation takes silu with num_experts, got {self.activation!r}"
            )
