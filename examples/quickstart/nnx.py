"""Trains an MLP in INT8, and logs, saves, resumes, freezes and exports it.

    python -m examples.quickstart.nnx runs/nnx

The same command with more ``--steps`` continues from the last checkpoint.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import export

import fbq_jax
from fbq_jax.nnx import FallbackDot, fallback_stats

CHANNELS = 256


class MLP(nnx.Module):
    """Two layers, in INT8 or in float."""

    def __init__(self, rngs: nnx.Rngs, int8: bool = True) -> None:
        """Makes the layers; each has an op of its own, which holds its state."""

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            dot: Any = FallbackDot(rngs=rngs) if int8 else jax.lax.dot_general
            return nnx.Linear(inputs, outputs, dot_general=dot, rngs=rngs)

        self.up = linear(CHANNELS, 4 * CHANNELS)
        self.down = linear(4 * CHANNELS, CHANNELS)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [tokens, channels] to the same shape."""
        return self.down(nnx.silu(self.up(x)))


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels: the made-up task is to reverse the channels."""
    key = jax.random.fold_in(jax.random.key(1), step)
    x = jax.random.normal(key, (1024, CHANNELS))
    return x, x[:, ::-1]


def start(int8: bool) -> tuple[MLP, nnx.Optimizer]:
    """The model and the optimizer before the first step."""
    model = MLP(nnx.Rngs(0), int8)
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


@nnx.jit
def train_step(
    model: MLP, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array
) -> jax.Array:
    """One step; the layers' thresholds move in the forward pass."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def main(argv: Sequence[str] | None = None) -> None:
    """Trains to the last step, then freezes and exports the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="checkpoints and the exported model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--float", action="store_true", help="train without INT8")
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    make = functools.partial(start, not args.float)

    with ocp.CheckpointManager(folder / "checkpoints") as checkpoints:
        if (last := checkpoints.latest_step()) is None:
            model, optimizer = make()
        else:
            abstract = nnx.eval_shape(make)
            like = ocp.args.StandardRestore(nnx.state(abstract))
            state = checkpoints.restore(last, args=like)
            model, optimizer = nnx.merge(nnx.graphdef(abstract), state)
        for step in range(int(optimizer.step[...]), args.steps):
            before = jax.device_get(fallback_stats(model))
            loss = train_step(model, optimizer, *batch(step))
            if step % 50 == 0 or step + 1 == args.steps:
                stats = fallback_stats(model)
                if not args.float:
                    fbq_jax.assert_live(before, stats)
                rates = " ".join(f"{name} {s.rate:.0%}" for name, s in stats.items())
                print(f"step {step + 1} loss {loss:.4f} fallback rates {rates}")
        if (step := int(optimizer.step[...])) != last:
            state = nnx.state((model, optimizer))
            checkpoints.save(step, args=ocp.args.StandardSave(state))

    x, _ = batch(0)
    frozen = model if args.float else fbq_jax.nnx.freeze(model, x)
    graphdef, state = nnx.split(frozen)
    serve = export.export(jax.jit(lambda x: nnx.merge(graphdef, state)(x)))(x)
    (folder / "model.bin").write_bytes(serve.serialize())


if __name__ == "__main__":
    main()
