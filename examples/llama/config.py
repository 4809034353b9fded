"""The options of a training run."""

# ruff: noqa: RUF009  (the defaults of options are constants)

import dataclasses
import re
from typing import Any, Literal

from examples.llama import fields, invariant
from examples.llama.errors import UserError
from examples.llama.fields import FromZero, Natural, Positive, Seed, Size, option
from examples.llama.model_config import LlamaConfig, Remat, SavedBits
from examples.llama.projections import DotGeneral
from fbq_jax import FallbackDot, Fp8Dot, RecipeError, RulesDot, recipes

# The dot_general of each recipe; None is jax.lax.dot_general in bfloat16.
RECIPES: dict[str, DotGeneral | None] = {
    "bf16": None,
    **{name: FallbackDot(recipe) for name, recipe in recipes.NAMED.items()},
    "fp8_delayed": Fp8Dot(scaling="delayed"),
    "fp8_current": Fp8Dot(scaling="current"),
}

# What rules match, in a model with experts or without.
LAYERS = (
    *("layers/attention/qkv/dense", "layers/attention/out"),
    *("layers/mlp/gate_up", "layers/mlp/down"),
    *("layers/mlp/experts/gate_up", "layers/mlp/experts/down"),
)
# The recipe for which `choosing` finds rules.
AUTO = "auto"

# Python reads bytes that are no UTF-8 as U+DC80 to U+DCFF.
_FILE_NAME = "[^\0\ud800-\udc7f\udd00-\udfff]+"
# Bits per value that the norms and gates of a quantized model save by default.
SAVED_BITS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All options that determine a run's numbers. Each field is a flag of train.py."""

    recipe: str = option(
        "fallback",
        f"recipe of the projections: {', '.join(RECIPES)}; or rules for paths of "
        f"layers, such as layers/mlp/down=row_block_lhs,.*=block; or {AUTO}, which "
        "finds rules by the errors of each layer at the start of a run",
    )
    data: str | None = option(
        None,
        "file, folder, nanoGPT .bin file or folder with train.bin and val.bin "
        "(default: the source of Python's standard library)",
    )
    from_hf: str | None = option(
        None,
        "folder or GGUF file of a model (Llama, Qwen, Mistral, Mixtral, Phi-3, "
        "SmolLM3, Gemma): sizes, initial weights and tokenizer",
    )
    seed: Seed = option(0, "seed of the initial weights and of the data order")
    hidden: Size = option(256, "width of the residual stream")
    ffn: Size = option(768, "width of the MLP, or of a token's experts together")
    layers: Size = option(4, "number of layers")
    heads: Size = option(4, "number of query heads")
    kv_heads: Size = option(2, "number of key and value heads")
    experts: Size | None = option(
        None, "number of experts in place of each MLP (default: one MLP)"
    )
    top_k: Size | None = option(
        None, "experts of each token, of the width ffn / top_k (default: 2)"
    )
    remat: Remat = option(
        "none",
        "what the backward pass of a layer recomputes: nothing (none), everything but "
        "INT8 and packed codes (codes), or everything (full)",
    )
    unroll: bool = option(
        False, "compile each layer by itself: slower to compile, faster to run"
    )
    saved_bits: SavedBits | Literal[0] | None = option(
        None,
        "bits per value that norms and gates save for the backward pass; 0 saves "
        f"floats (default: {SAVED_BITS}, or 0 with --recipe bf16)",
    )
    reduce: Literal["float32", "bfloat16", "int32", "int8"] | None = option(
        None,
        "dtype in which devices sum their partial INT8 products: float32, bfloat16, "
        "int32 for recipes without blocks, which is exact, or int8 for weight "
        "gradients only (default: the model's dtype)",
    )
    optimizer_codes: bool | None = option(
        None,
        "the optimizer writes the codes of the weights that it changes, and steps "
        "quantize no weight; codes take 2 bytes per weight (default: yes, if norms, "
        "gates and projections run fused in INT8)",
    )
    moments: Literal["float32", "fp8"] = option(
        "float32", "what AdamW's moments are stored in: 8 bytes a weight, or 2"
    )
    invariant: bool = option(
        False,
        "give a token's log-probability the same bits in training, in prefill and in "
        "decoding, at any batch; the head is quantized, too; takes a batch-invariant "
        "recipe, such as rowwise",
    )
    quantize_head: bool = option(
        False, "multiply by the head as by the projections, too, not in bfloat16"
    )
    batch: Size = option(8, "sequences per step")
    accumulate: Size = option(1, "microbatches per step")
    seq: Size = option(256, "tokens per sequence")
    steps: Size = option(150, "optimizer steps; the first tenth is the warmup")
    lr: Positive = option(2e-3, "peak learning rate (2e-5 with --from-hf)")
    clip: FromZero = option(1.0, "maximum gradient norm; 0 disables clipping")
    log_every: Size = option(1, "steps between reads of the metrics, which wait")
    eval_every: Size = option(50, "steps between validations")
    check_every: Natural = option(
        1000,
        f"steps between looks at the layers of --recipe {AUTO}, which warn of layers "
        "whose errors have grown; 0 looks only at the start",
    )
    save_every: Natural = option(
        50, "steps between checkpoints; 0 writes no checkpoint, picture or model"
    )

    def __post_init__(self) -> None:
        fields.check(self)
        for name in ("data", "from_hf"):
            text = getattr(self, name)
            if text is not None and not re.fullmatch(_FILE_NAME, text):
                raise UserError(f"{name} takes the name of a file, got {text!r}")
        fields.check_divides(self, "accumulate", "batch")
        if self.experts is not None:
            object.__setattr__(self, "top_k", self.top_k or 2)
        elif self.top_k is not None:
            raise UserError("top_k takes a number of experts: set experts, too")
        if self.from_hf is None:
            self.sizes(vocab_size=1)
        if self.experts is not None:
            fields.check_divides(self, "top_k", "ffn")
        self.dot_general(experts=self.experts is not None)

    def sizes(self, vocab_size: int) -> LlamaConfig:
        """Returns the sizes of a new model."""
        experts: dict[str, Any] = {}
        if self.experts is not None:
            experts = {"num_experts": self.experts, "top_k": self.top_k}
            # The weight of one expert would always be 1 if it were renormalized.
            experts["renormalize"] = self.top_k != 1
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.ffn // (self.top_k or 1),
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            max_seq_len=self.seq,
            invariant=self.invariant,
            **experts,
        )

    def dot_general(self, *, experts: bool) -> DotGeneral | None:
        """Returns the recipe's ``dot_general``, with `reduce` applied; None for bf16.

        Raises UserError if the recipe does not support `reduce`, `optimizer_codes` or
        `experts`.
        """
        dot_general = read_recipe(self.recipe)
        if self.invariant:
            dot_general = invariant.checked(dot_general)
        is_quantized = isinstance(dot_general, FallbackDot | RulesDot)
        if self.optimizer_codes and not is_quantized and self.recipe != AUTO:
            got = f"got {self.recipe}"
            raise UserError(f"optimizer_codes applies to INT8 recipes only, {got}")
        if self.quantize_head and not isinstance(dot_general, FallbackDot):
            takes = "a recipe of INT8 or FP8 blocks or rows"
            raise UserError(f"quantize_head takes {takes}, got {self.recipe}")
        if experts and self.recipe == AUTO:
            raise UserError("auto measures no experts: set --recipe to rules")
        if experts and isinstance(dot_general, Fp8Dot):
            fp8 = "fp8_delayed and fp8_current"
            raise UserError(f"experts take any recipe but {fp8}, got {self.recipe}")
        if self.reduce is None:
            return dot_general
        if experts:
            raise UserError("reduce does not apply to the products of experts")
        if not isinstance(dot_general, FallbackDot):
            got = f"got {self.reduce!r} with {self.recipe}"
            raise UserError(f"reduce applies to INT8 recipes only, {got}")
        recipe, changed = dot_general.recipe, {}
        try:
            for name in ("drhs",) if self.reduce == "int8" else ("fwd", "dlhs", "drhs"):
                gemm = getattr(recipe, name)
                if self.reduce == "int8" or not gemm.in_floats:
                    changed[name] = dataclasses.replace(gemm, reduce=self.reduce)
            return FallbackDot(dataclasses.replace(recipe, **changed))
        except RecipeError as error:
            raise UserError(f"reduce with {self.recipe}: {error}") from error


def read_recipe(text: str) -> DotGeneral | None:
    """Returns the ``dot_general`` of a recipe's name, or of rules ``PATTERN=NAME,...``.

    Until rules are found, ``"auto"`` computes in floats, as None and bf16 do.
    """
    named = {**recipes.NAMED, "bf16": None}
    if "=" not in text:
        if text not in (*RECIPES, AUTO):
            takes = f"one of {', '.join(RECIPES)}, {AUTO}, or rules PATTERN=RECIPE,..."
            raise UserError(f"recipe takes {takes}, got {text!r}")
        return RECIPES.get(text)
    rules = {}
    for rule in text.split(","):
        pattern, _, name = rule.rpartition("=")
        if not pattern or name not in named:
            takes = f"PATTERN=RECIPE, with one of {', '.join(named)}"
            raise UserError(f"a rule of recipe takes {takes}, got {rule!r}")
        rules[pattern] = named[name]
    try:
        dot_general = RulesDot(rules)
    except ValueError as error:
        raise UserError(f"recipe: {error}") from error
    for pattern in rules:
        if not any(re.fullmatch(pattern, layer) for layer in LAYERS):
            raise UserError(
                f"a rule of recipe matches one of {', '.join(LAYERS)}, got {pattern!r}"
            )
    return dot_general
