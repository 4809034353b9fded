"""Trains an MLP in INT8, and logs, saves, resumes, freezes and exports it.

    python -m examples.quickstart.linen runs/linen

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
from flax import linen as nn
from flax.training import train_state
from jax import export

import fbq_jax
from fbq_jax import assert_live, fallback_dot, fallback_stats

CHANNELS = 256


class MLP(nn.Module):
    """Two layers, in INT8 or in float."""

    int8: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [tokens, channels] to the same shape."""
        dot = fallback_dot if self.int8 else None
        x = nn.Dense(4 * CHANNELS, dot_general=dot, name="up")(x)
        return nn.Dense(CHANNELS, dot_general=dot, name="down")(nn.silu(x))


class TrainState(train_state.TrainState):
    """Parameters, optimizer state, and the thresholds of the layers."""

    fallback: Any


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels: the made-up task is to reverse the channels."""
    key = jax.random.fold_in(jax.random.key(1), step)
    x = jax.random.normal(key, (1024, CHANNELS))
    return x, x[:, ::-1]


def new_state(model: MLP) -> TrainState:
    """The state before the first step."""
    variables = model.init(jax.random.key(0), batch(0)[0])
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        fallback=variables.get("fallback", {}),
        tx=optax.adamw(1e-3),
    )


@functools.partial(jax.jit, donate_argnums=0)
def train_step(
    state: TrainState, x: jax.Array, y: jax.Array
) -> tuple[TrainState, jax.Array]:
    """One step; the layers' thresholds move in the forward pass."""

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "fallback": state.fallback}
        z, updates = state.apply_fn(variables, x, mutable=["fallback"])
        return jnp.mean((z - y) ** 2), updates.get("fallback", {})

    grad = jax.value_and_grad(loss_of, has_aux=True)
    (loss, fallback), grads = grad(state.params)
    return state.apply_gradients(grads=grads, fallback=fallback), loss


def main(argv: Sequence[str] | None = None) -> None:
    """Trains to the last step, then freezes and exports the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="checkpoints and the exported model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--float", action="store_true", help="train without INT8")
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    model = MLP(int8=not args.float)
    make = functools.partial(new_state, model)

    with ocp.CheckpointManager(folder / "checkpoints") as checkpoints:
        if (last := checkpoints.latest_step()) is None:
            state = make()
        else:
            like = ocp.args.StandardRestore(jax.eval_shape(make))
            state = checkpoints.restore(last, args=like)
        for step in range(int(state.step), args.steps):
            # Copied to the host, because the step overwrites its state.
            before = jax.device_get(fallback_stats({"fallback": state.fallback}))
            state, loss = train_step(state, *batch(step))
            if step % 50 == 0 or step + 1 == args.steps:
                stats = fallback_stats({"fallback": state.fallback})
                if not args.float:
                    assert_live(before, stats)
                rates = " ".join(f"{name} {s.rate:.0%}" for name, s in stats.items())
                print(f"step {step + 1} loss {loss:.4f} fallback rates {rates}")
        if state.step != last:
            checkpoints.save(int(state.step), args=ocp.args.StandardSave(state))

    x, _ = batch(0)
    variables = {"params": state.params, "fallback": state.fallback}
    frozen = variables if args.float else fbq_jax.freeze(model, variables, x)
    serve = export.export(jax.jit(functools.partial(model.apply, frozen)))(x)
    (folder / "model.bin").write_bytes(serve.serialize())


if __name__ == "__main__":
    main()
