"""Llama 3 8B on one GPU: the memory and the time of an optimizer step.

    python -m experiments.whole_model --out FILE [--batch N] [--only PATTERN] [--memory]

Weights are random, in float32, and tokens too. Each row is a recipe with what it saves
and recomputes; with ``--memory`` programs are compiled and do not run. A program that
needs more memory than the GPU has does not run either.
"""

import argparse
import dataclasses
import fnmatch
import math
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

import jax

from examples.llama import flops
from examples.llama.config import RECIPES, SAVED_BITS, Config
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig, Remat
from examples.llama.step import (
    add_codes,
    init_state,
    make_initializer,
    make_optimizer,
    make_train_step,
)
from experiments import result_files
from experiments.bench import memory
from fbq_jax.bench import measure

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "max_seq_len": 8192,
    "rope_theta": 500_000.0,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A recipe, and what a step with it saves.

    Attributes:
        recipe: Its name, or "bf16".
        remat: What the backward pass of a layer recomputes, as ``--remat``.
        packed: Whether norms and gates save 10 bits a value, as recipes always do.
        moments: What AdamW's moments are stored in, as ``--moments``.
        quantize_head: Whether the head is quantized.
        codes: Whether the optimizer writes the codes of the weights.
    """

    recipe: str
    remat: Remat = "none"
    packed: bool = False
    moments: Literal["float32", "fp8"] = "fp8"
    quantize_head: bool = False
    codes: bool = False

    def name(self) -> str:
        """What a row is called."""
        parts = [self.recipe, f"remat {self.remat}", f"{self.moments} moments"]
        parts += ["packed"] * self.packed
        parts += ["quantized head"] * self.quantize_head + ["codes kept"] * self.codes
        return ", ".join(parts)

    def model(self, sizes: dict[str, Any]) -> Llama:
        """The model."""
        op = RECIPES[self.recipe]
        bits = SAVED_BITS if self.packed or op is not None else None
        config = LlamaConfig(
            **sizes,
            remat=self.remat,
            saved_bits=bits,
            quantize_head=self.quantize_head,
        )
        return Llama(config, op)


SETTINGS = (
    Setting("bf16", moments="float32", remat="full"),
    Setting("bf16"),
    Setting("bf16", packed=True),
    Setting("bf16", remat="full"),
    *(
        Setting(recipe, remat=remat)
        for remat in ("none", "codes")
        for recipe in ("fallback", "row_block_lhs", "block")
    ),
    Setting("fallback", quantize_head=True),
    Setting("row_block_lhs", quantize_head=True),
    Setting("fallback", codes=True),
)


def measured(
    setting: Setting, sizes: dict[str, Any], batch: int
) -> Generator[dict[str, Any]]:
    """Yields the figures of memory, and if it is continued, those of time."""
    model = setting.model(sizes)
    # This learning rate changes nothing, so the same tokens stay unlearned.
    config = Config(lr=1e-6, moments=setting.moments, optimizer_codes=setting.codes)
    optimizer, schedule = make_optimizer(config)

    def first(key: jax.Array) -> Any:
        return add_codes(
            model, optimizer, make_initializer(model, optimizer)(key, None)
        )

    length = model.config.max_seq_len
    tokens = jax.random.randint(
        jax.random.key(1), (1, batch, length + 1), 0, model.config.vocab_size
    )
    step = make_train_step(model, optimizer, schedule)
    shapes = jax.eval_shape(first, jax.random.key(0))
    compiled = step.lower(shapes, tokens).compile()
    yield {"peak_bytes": memory.peak_bytes(compiled)}
    state = init_state(model, optimizer, None, seed=0)
    state = add_codes(model, optimizer, state)
    for _ in range(2):  # thresholds
        state, metrics = compiled(state, tokens)
    timing = measure.step_timing(compiled, state, tokens, effort=measure.QUICK)
    count = batch * length
    work = flops.per_token(model.config, length) * count
    yield {
        "ms": timing.ms,
        "tokens_per_s": count / timing.ms * 1e3,
        "model_tflops": work / timing.ms / 1e9,
        "loss": float(metrics["loss"]),
    }


def rows(
    settings: list[Setting], sizes: dict[str, Any], batch: int, *, runs: bool
) -> Iterator[dict[str, Any]]:
    """The figures of each setting."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    for setting in settings:
        figures = measured(setting, sizes, batch)
        row = {"what": setting.name(), "batch": batch} | next(figures)
        if runs and row["peak_bytes"] < limit:
            row |= next(figures)
        figures.close()
        yield row


def main(argv: list[str] | None = None, sizes: dict[str, Any] = LLAMA_3_8B) -> None:
    """Measures, and writes each row as soon as it is there."""
    parser = argparse.ArgumentParser(prog="experiments.whole_model")
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--batch", type=int, default=1, help="sequences of 8192 tokens")
    add("--only", default="*", help="a pattern of the names of rows")
    add("--memory", action="store_true", help="compile only")
    asked = parser.parse_args(argv)
    chosen = [s for s in SETTINGS if fnmatch.fnmatch(s.name(), asked.only)]
    found = rows(chosen, sizes, asked.batch, runs=not asked.memory)
    result_files.save_rows(found, asked.out)


if __name__ == "__main__":
    main()
