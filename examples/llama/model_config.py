"""The sizes, the variants and the numerics of a Llama."""

import dataclasses
import reprlib
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp

from examples.llama import fields
from examples.llama.errors import UserError
from examples.llama.fields import FromOne, FromZero, Positive, Range, Size
from examples.llama.rotary import Rope, RopeScaling, Tables, YarnScaling, rotary_tables
from fbq_jax import Routing, nonlinear

SavedBits = Annotated[int, Range(int, nonlinear.BITS[0], nonlinear.BITS[-1])]
# What a layer recomputes in the backward pass; see `LlamaConfig.remat`.
Remat = Literal["none", "codes", "full"]


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

    Raises UserError, which names a field that is not accepted.
    """

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size  # of the MLP; of each expert, if there are experts
    num_layers: Size
    num_heads: Size  # of queries
    num_kv_heads: Size  # a divisor of num_heads
    # An even number; None means hidden_size / num_heads.
    head_dim: Size = None  # type: ignore[assignment]  # __post_init__ makes it an int
    max_seq_len: Size = 8192  # the longest sequence that the model accepts, in tokens

    rope_theta: FromOne = 10000.0  # the base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # how they are stretched
    # The base, unscaled, in the layers with a window; None means that of all layers.
    local_rope_theta: FromOne | None = None
    nope_layers: tuple[int, ...] = ()  # those that do not rotate queries and keys
    # The keys that a query sees in the sliding layers; None stands for all, and every.
    sliding_window: Size | None = None
    sliding_layers: tuple[int, ...] | None = None

    norm_eps: Positive = 1e-5  # what RMSNorm adds to the mean square
    unit_offset_norms: bool = False  # norms multiply by 1 + scale instead of scale
    post_norms: bool = False  # norms also before the skip connections
    qk_norm: bool = False  # normalizes queries and keys, each head by itself
    qkv_bias: bool = False
    # Scores are divided by its square root; None means head_dim.
    query_pre_attn_scalar: Positive | None = None
    attn_softcap: Positive | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: Positive | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the MLP's gate

    num_experts: Size | None = None  # in place of each MLP; None for one MLP
    top_k: Size = 2  # the experts of each token
    renormalize: bool = True  # a token's experts have weights that sum to 1
    # The weight of the loss that balances experts, num_experts * sum(f * p). As
    # transformers counts it, f is the share of the tokens that select an expert, and
    # sums to top_k; p is the expert's mean probability.
    router_aux_loss_coef: FromZero = 0.01

    embed_scale: Positive = 1.0  # multiplies the embeddings that enter the first layer
    tie_embeddings: bool = False  # the head shares the embedding table
    dtype: Any = jnp.bfloat16  # or float32; parameters are float32 in either case
    # What each layer saves for the backward pass, which recomputes the rest: "none"
    # saves all that it reads, "codes" the layer's input, the INT8 codes of quantized
    # operands and the packed codes of saved_bits, "full" the input only.
    remat: Remat = "none"
    # Compiles each layer by itself. A loop over the layers takes less time to compile,
    # but copies what a layer saves into a stack, and in the backward pass out of it.
    unroll: bool = False
    # The bits per value that norms and gates save for the backward pass; 10 have no
    # measurable effect on training. None saves autodiff's floats.
    saved_bits: SavedBits | None = None
    # The bits of a token's logits do not depend on the batch, and are those of decoding
    # with a cache; the head is quantized, too. For batch-invariant recipes.
    invariant: bool = False
    # Whether the head multiplies as the projections do.
    quantize_head: bool = False

    def __post_init__(self) -> None:
        fields.check(self)
        fields.check_divides(self, "num_kv_heads", "num_heads")
        if self.head_dim is None:
            fields.check_divides(self, "num_heads", "hidden_size")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        layers = range(self.num_layers)
        for name in ("nope_layers", "sliding_layers"):
            if any(layer not in layers for layer in getattr(self, name) or ()):
                n, got = len(layers), reprlib.repr(getattr(self, name))
                raise UserError(f"{name} takes indices of the {n} layers, got {got}")
        theta, dim, experts = self.rope_theta, self.head_dim, self.num_experts
        if dim % 2:
            default = "by default it is hidden_size / num_heads"
            raise UserError(f"head_dim takes an even number, got {dim}; {default}")
        if self.sliding_layers and self.sliding_window is None:
            raise UserError("sliding_window takes an integer with sliding_layers")
        if isinstance(self.rope_scaling, YarnScaling) and (theta == 1 or dim == 2):
            limits = "a rope_theta above 1 and a head_dim above 2"
            raise UserError(f"YaRN takes {limits}, got {theta:g} and {dim}")
        if experts and self.top_k > experts:
            raise UserError(
                f"top_k takes at most num_experts ({experts}), got {self.top_k}"
            )
        if experts and self.renormalize and self.top_k == 1:
            why = "or the router has no gradient"
            raise UserError(f"renormalize takes False with a top_k of 1, {why}")
        if experts and self.activation != "silu":
            got = f"got {self.activation!r}"
            raise UserError(f"activation takes silu with num_experts, {got}")
        if experts and self.invariant:
            raise UserError("invariant takes a model without experts")
        if self.dtype not in (jnp.bfloat16, jnp.float32):
            got = f"got {self.dtype!r}"
            raise UserError(f"dtype takes jnp.bfloat16 or jnp.float32, {got}")

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

        def kind(layer: int) -> LayerKind:
            slides = self.sliding_window is not None and (
                self.sliding_layers is None or layer in self.sliding_layers
            )
            rotation = local if slides else rope
            window = self.sliding_window if slides else None
            return LayerKind(window, None if layer in self.nope_layers else rotation)

        return tuple(map(kind, range(self.num_layers)))

    def distinct_kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kinds that some layer has, in the order of the first layers."""
        return tuple(dict.fromkeys(self.layer_kinds()))

    def rotary_tables(self, seq_len: int) -> Tables:
        """Returns `rotary.rotary_tables` of the kinds of layers."""
        ropes = [kind.rope for kind in self.distinct_kinds()]
        return rotary_tables(ropes, self.head_dim, seq_len)
