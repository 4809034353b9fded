"""Trains the Qwen 3 of google-tunix in INT8, without a change to its code.

    python -m examples.quickstart.qwen3

The text is the source of Python's standard library, and each byte is a token.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fbq_jax import recipes
from fbq_jax.contrib import qwix
from fbq_jax.nnx import fallback_stats

BATCH, LENGTH, HELD_OUT = 8, 128, 256
# The first pattern that matches a layer's path counts; None leaves the layer in float.
RULES = {"lm_head": None, ".*": recipes.fallback}


def load_text() -> tuple[jax.Array, jax.Array]:
    """Training and held-out text, int32 [windows, LENGTH + 1], in random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    shuffled = jnp.asarray(np.random.default_rng(0).permutation(windows), jnp.int32)
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def make_model() -> Any:
    """A Qwen 3 of two layers, with random weights."""
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=256,
        hidden_dim=768,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    rngs = nnx.Rngs(0)
    model = qwen3.Qwen3(config, rngs=rngs)
    draw_mlps(model, rngs)
    return model


def draw_mlps(model: Any, rngs: nnx.Rngs) -> None:
    """Draws the MLPs' kernels, which Tunix leaves at 0 until a checkpoint is loaded."""
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Linear):
            shape = layer.kernel.shape
            layer.kernel[...] = nnx.initializers.lecun_normal()(rngs.params(), shape)


def inputs(windows: jax.Array) -> tuple[Any, ...]:
    """The model's arguments: tokens, positions, no cache, and a causal mask."""
    positions, mask = jnp.arange(LENGTH)[None], jnp.tri(LENGTH, dtype=bool)[None]
    return windows[:, :-1], positions, None, mask


def loss_of(model: Any, windows: jax.Array) -> jax.Array:
    """The mean cross entropy of the next byte."""
    logits, _ = model(*inputs(windows))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(losses)


@nnx.jit
def train_step(model: Any, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """One step; the layers' thresholds move in the forward pass."""
    loss, grads = nnx.value_and_grad(loss_of)(model, windows)
    optimizer.update(model, grads)
    return loss


def evaluate(model: Any, windows: jax.Array) -> jax.Array:
    """The loss in evaluation mode, in which the thresholds stay as they are."""
    model.eval()
    loss = nnx.jit(loss_of)(model, windows)
    model.train()
    return loss


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the model, and prints the loss of text that it has not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--float", action="store_true", help="train without INT8")
    args = parser.parse_args(argv)
    text, held_out = load_text()
    model, call, rngs = make_model(), inputs(text[:BATCH]), nnx.Rngs(1)
    if not args.float:
        model, report = qwix.quantize_nnx(model, RULES, *call, quantize_rngs=rngs)
        print(report)

    warmup = args.steps // 10
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, args.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate), wrt=nnx.Param)
    random = np.random.default_rng(1)
    for step in range(args.steps):
        batch = text[random.integers(len(text), size=BATCH)]
        loss = train_step(model, optimizer, batch)
        if step % 100 == 0 or step + 1 == args.steps:
            rates = [stats.rate for stats in fallback_stats(model).values()]
            shown = f", mean fallback rate {np.mean(rates):.0%}" if rates else ""
            print(f"step {step + 1} loss {loss:.4f}{shown}")
    print(f"held-out loss {evaluate(model, held_out):.4f}")


if __name__ == "__main__":
    main()
