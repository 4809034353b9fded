"""The options of a training run."""

import dataclasses
import functools
import os
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from examples.llama import field_types
from examples.llama.model_config import REMAT
from examples.llama.projections import DotGeneral
from fbq_jax import (
    FallbackDot,
    Fp8Dot,
    RecipeError,
    nonlinear,
    ragged_dot,
    recipes,
)

# The dot_general of each recipe; None is jax.lax.dot_general in bfloat16.
RECIPES: dict[str, DotGeneral | None] = {
    "bf16": None,
    **{name: FallbackDot(recipe) for name, recipe in recipes.NAMED.items()},
    "fp8_delayed": Fp8Dot(scaling="delayed"),
    "fp8_current": Fp8Dot(scaling="current"),
}

# Bits per value that the norms and gates of a quantized model save by default.
SAVED_BITS = 10

# The dtypes of cross-device sums that `fbq_jax.Gemm.reduce` accepts.
REDUCE_DTYPES = ("float32", "bfloat16", "int8")


class ConfigError(ValueError):
    """An option has a value that is not accepted."""


def _is_file_name(text: str) -> bool:
    """Whether the system accepts a text as a file's name, if it is not too long."""
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options that determine a run's numbers. Each field is a flag of train.py.

    Raises:
        ConfigError: A field has another type or is out of range. The message names the
            field and what it accepts.
    """

    recipe: str = _option(
        "fallback", f"recipe of the projections: {', '.join(RECIPES)}"
    )
    data: str | None = _option(
        None,
        "file, folder, nanoGPT .bin file or folder with train.bin and val.bin "
        "(default: the source of Python's standard library)",
    )
    from_hf: str | None = _option(
        None,
        "folder of a Hugging Face model (Llama, Qwen, Mistral, Mixtral, Phi-3, "
        "SmolLM3, Gemma) that provides the sizes, the initial weights and the "
        "tokenizer",
    )
    seed: int = _option(0, "seed of the initial weights and of the data order")
    hidden: int = _option(256, "width of the residual stream")
    ffn: int = _option(
        768, "width of the MLP; with --experts, of a token's experts together"
    )
    layers: int = _option(4, "number of layers")
    heads: int = _option(4, "number of query heads")
    kv_heads: int = _option(2, "number of key and value heads")
    experts: int | None = _option(
        None, "number of experts that take the place of each MLP (default: one MLP)"
    )
    top_k: int | None = _option(
        None,
        "experts of each token, each of the width ffn / top_k, so that a token passes "
        "through as many parameters as with one MLP (default: 2 with --experts)",
    )
    remat: str = _option(
        "none",
        "what the backward pass of a layer recomputes: nothing (none), everything but "
        "INT8 and packed codes (codes), or everything (full)",
    )
    unroll: bool = _option(
        False,
        "compile each layer by itself instead of a loop over the layers: compilation "
        "takes longer, and a step copies less",
    )
    saved_bits: int | None = _option(
        None,
        "bits per value that norms and gates save for the backward pass; 0 saves "
        f"floats (default: {SAVED_BITS}, or 0 with --recipe bf16)",
    )
    reduce: str | None = _option(
        None,
        "dtype in which devices sum their partial INT8 products: "
        f"{', '.join(REDUCE_DTYPES)}; int8 applies to weight gradients only (default: "
        "the model's dtype, in which XLA sums all other products)",
    )
    batch: int = _option(8, "sequences per step")
    accumulate: int = _option(1, "microbatches per step")
    seq: int = _option(256, "tokens per sequence")
    steps: int = _option(150, "optimizer steps; the first tenth is the warmup")
    lr: float = _option(2e-3, "peak learning rate (2e-5 with --from-hf)")
    clip: float = _option(1.0, "maximum gradient norm; 0 disables clipping")
    log_every: int = _option(
        1, "steps between reads of the metrics, each of which waits for the device"
    )
    eval_every: int = _option(50, "steps between validations")
    save_every: int = _option(
        50, "steps between checkpoints; 0 writes no checkpoint, picture or model"
    )

    def __post_init__(self) -> None:
        try:
            field_types.check(self)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._check_choices()
        self._check_numbers()
        if self.from_hf is None:
            self._check_heads()
        self._check_experts()

    def _check_choices(self) -> None:
        choices = [("recipe", tuple(RECIPES)), ("remat", REMAT)]
        if self.reduce is not None:
            choices.append(("reduce", REDUCE_DTYPES))
        for name, accepted in choices:
            if (value := getattr(self, name)) not in accepted:
                raise ConfigError(
                    f"{name} takes one of {', '.join(accepted)}, got {value!r}"
                )
        if self.saved_bits not in (None, 0, *nonlinear.BITS):
            raise ConfigError(
                f"saved_bits takes 0 or an integer from {nonlinear.BITS[0]} to "
                f"{nonlinear.BITS[-1]}, got {self.saved_bits}"
            )
        try:
            self.dot_general()
        except RecipeError as error:
            raise ConfigError(f"reduce with {self.recipe}: {error}") from error

    def _check_numbers(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            lowest = int(option.name not in ("seed", "save_every", "saved_bits"))
            is_integer = option.type in (int, int | None) and value is not None
            # JAX's integers have 32 bits; of a longer seed it drops bits in silence.
            highest = 2**32 - 1 if option.name == "seed" else 2**31 - 1
            if is_integer and value < lowest:
                raise ConfigError(
                    f"{option.name} takes an integer of at least {lowest}, got {value}"
                )
            if is_integer and value > highest:
                raise ConfigError(
                    f"{option.name} takes an integer of at most {highest}, got {value}"
                )
            if isinstance(value, str) and not _is_file_name(value):
                raise ConfigError(
                    f"{option.name} takes text that can name a file, got {value!r}"
                )
        if self.lr <= 0:
            raise ConfigError(f"lr takes a finite positive number, got {self.lr}")
        if self.clip < 0:
            raise ConfigError(
                f"clip takes a finite number of at least 0, got {self.clip}"
            )
        if self.batch % self.accumulate:
            raise ConfigError(
                f"accumulate takes a divisor of batch ({self.batch}), "
                f"got {self.accumulate}"
            )

    def _check_heads(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"kv_heads takes a divisor of heads ({self.heads}), got {self.kv_heads}"
            )
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"hidden takes an even multiple of heads ({self.heads}), as RoPE "
                f"rotates pairs, got {self.hidden}"
            )

    def _check_experts(self) -> None:
        if self.experts is None:
            if self.top_k is not None:
                raise ConfigError("top_k takes a number of experts: set experts, too")
            return
        if self.top_k is None:
            object.__setattr__(self, "top_k", 2)
        assert self.top_k is not None
        if self.top_k > self.experts:
            raise ConfigError(
                f"top_k takes at most the number of experts ({self.experts}), "
                f"got {self.top_k}"
            )
        if self.ffn % self.top_k:
            raise ConfigError(
                f"ffn takes a multiple of top_k ({self.top_k}), the experts that share "
                f"it, got {self.ffn}"
            )
        self.check_recipe_of_experts()

    def check_recipe_of_experts(self) -> None:
        """Raises ConfigError if experts cannot run with the recipe."""
        if self.reduce is not None:
            raise ConfigError(
                f"reduce does not apply to the products of experts, got {self.reduce!r}"
            )
        if (dot_general := self.dot_general()) is None:
            return
        try:
            if not isinstance(dot_general, FallbackDot):
                raise ValueError("products of experts take no FP8")
            multiply = functools.partial(ragged_dot, recipe=dot_general.recipe)
            row = jax.ShapeDtypeStruct((1, 1), jnp.float32)
            kernel = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
            sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
            jax.eval_shape(multiply, row, kernel, sizes)
        except ValueError as error:
            reason = str(error).partition("; got")[0]
            raise ConfigError(
                "experts take one of the recipes bf16, fallback, block and jetfire, "
                f"got {self.recipe}: {reason}"
            ) from error

    def dot_general(self) -> DotGeneral | None:
        """Returns the recipe's ``dot_general``, with `reduce` applied; None for bf16.

        Raises:
            ConfigError: `reduce` is set and the recipe is not an INT8 recipe.
            RecipeError: The recipe does not support `reduce`.
        """
        dot_general = RECIPES[self.recipe]
        if self.reduce is None:
            return dot_general
        if not isinstance(dot_general, FallbackDot):
            raise ConfigError(
                f"reduce applies to INT8 recipes only, got {self.reduce!r} with "
                f"{self.recipe}: leave it out, XLA sums the products of other recipes"
            )
        recipe = dot_general.recipe
        gemms = {name: getattr(recipe, name) for name in ("fwd", "dlhs", "drhs")}
        quantized = [name for name, gemm in gemms.items() if not gemm.in_floats]
        reduce: Any = self.reduce
        changed = {
            name: dataclasses.replace(gemms[name], reduce=reduce)
            for name in (["drhs"] if reduce == "int8" else quantized)
        }
        return FallbackDot(dataclasses.replace(recipe, **changed))
