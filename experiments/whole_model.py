"""Models of users' size on a GPU or two: memory and time of an optimizer step.

    python -m experiments.whole_model llama-3-8b --out FILE
    python -m experiments.whole_model qwen3-30b-a3b --layers 8 --out FILE

Weights are random, in float32, and tokens too. Each row is a recipe with what it saves
and recomputes. A program that needs more memory than the GPU has does not run. The bf16
experts multiply by Tokamax where that is installed.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import math
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from examples.llama import flops, mesh
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
from experiments.bench import harness, memory
from fbq_jax.bench import measure, moe

Sizes = dict[str, Any]
MODELS: dict[str, Sizes] = {
    "llama-3-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "max_seq_len": 8192,
        "rope_theta": 500_000.0,
    },
    "qwen3-30b-a3b": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 128,
        "max_seq_len": 4096,
        "rope_theta": 1_000_000.0,
        "qk_norm": True,
        "num_experts": 128,
        "top_k": 8,
    },
}
_MOST_KERNELS = 40  # that a row names, the longest


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

    def model(self, sizes: Sizes) -> Llama:
        """The model."""
        op: Any = RECIPES[self.recipe]
        if op is None and "num_experts" in sizes:
            op = _with_tokamax()
        bits = SAVED_BITS if self.packed or self.recipe != "bf16" else None
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


def _with_tokamax() -> Any:
    """A ``dot_general`` in bf16 whose experts multiply by Tokamax; None without it."""
    *_, experts = moe.bf16()
    if experts is None:
        return None

    def dot_general(*operands: Any, **options: Any) -> jax.Array:
        return jax.lax.dot_general(*operands, **options)

    dot_general.ragged_dot = experts.ragged_dot  # type: ignore[attr-defined]
    return dot_general


def measured(setting: Setting, sizes: Sizes, batch: int) -> Generator[dict[str, Any]]:
    """Yields the figures of memory; if it is continued, those of time and kernels."""
    model = setting.model(sizes)
    # This learning rate changes nothing, so the same tokens stay unlearned.
    config = Config(lr=1e-6, moments=setting.moments, optimizer_codes=setting.codes)
    optimizer, schedule = make_optimizer(config)

    def first(key: jax.Array) -> Any:
        state = make_initializer(model, optimizer)(key, None)
        return add_codes(model, optimizer, state)

    length, vocabulary = model.config.max_seq_len, model.config.vocab_size
    draw = np.random.default_rng(0).integers
    tokens = harness.distribute(draw(vocabulary, size=(1, batch, length + 1)))
    shapes = jax.eval_shape(first, jax.random.key(0))
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        mesh.shardings(shapes),
    )
    step = make_train_step(model, optimizer, schedule)
    compiled = step.lower(shapes, tokens).compile()
    yield {"peak_bytes": memory.peak_bytes(compiled)}
    state = init_state(model, optimizer, None, seed=0)
    state = add_codes(model, optimizer, state)
    for _ in range(2):  # thresholds
        state, metrics = compiled(state, tokens)
    running = measure.RunningStep(compiled, state, tokens)
    timing = measure.timing(running, effort=measure.QUICK, burst_of="calls")
    count = batch * length
    yield {
        "ms": timing.ms,
        "tokens_per_s": count / timing.ms * 1e3,
        "model_tflops": count * flops.per_token(model.config, length) / timing.ms / 1e9,
        "loss": float(metrics["loss"]),
        "kernels": _kernels(running),
    }


def _kernels(running: measure.RunningStep) -> dict[str, float]:
    """The milliseconds of the longest kernels of a step, and of all others."""
    times: dict[str, float] = defaultdict(float)
    with contextlib.suppress(measure.NoKernelsError):
        for name, ms in measure.kernels(running):
            times[name] += ms
    by_time = sorted(times.items(), key=lambda item: -item[1])
    others = sum(ms for _, ms in by_time[_MOST_KERNELS:])
    return dict(by_time[:_MOST_KERNELS]) | {"others": others}


def rows(settings: list[Setting], sizes: Sizes, batch: int) -> Iterator[dict[str, Any]]:
    """The figures of each setting."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    for setting in settings:
        figures = measured(setting, sizes, batch)
        row = {"what": setting.name(), "batch": batch, "layers": sizes["num_layers"]}
        row |= {"devices": mesh.size(), **next(figures)}
        if row["peak_bytes"] < limit:
            row |= next(figures)
        figures.close()  # frees the model
        yield row


def main(argv: list[str] | None = None) -> None:
    """Measures, and writes each row as soon as it is there."""
    parser = argparse.ArgumentParser(prog="experiments.whole_model")
    add = parser.add_argument
    add("model", choices=MODELS)
    add("--out", type=Path, required=True)
    add("--batch", type=int, default=1, help="sequences")
    add("--layers", type=int, help="how many of the model's layers (default: all)")
    add("--mesh", default="", help="devices, as for the Llama's --mesh")
    add("--only", default="*", help="a pattern of the names of rows")
    asked = parser.parse_args(argv)
    sizes = dict(MODELS[asked.model])
    sizes["num_layers"] = asked.layers or sizes["num_layers"]
    chosen = [s for s in SETTINGS if fnmatch.fnmatch(s.name(), asked.only)]
    with harness.devices(asked.mesh):
        result_files.save_rows(rows(chosen, sizes, asked.batch), asked.out)


if __name__ == "__main__":
    main()
