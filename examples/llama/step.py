"""One step of training: what it carries, and what it does with a batch.

The quantized layers keep their thresholds in the collection "fallback". A step carries
it along as it would batch statistics: `apply` gets it mutable and returns the new one.
Delayed FP8 keeps its scales in a collection of Flax's, whose new values are its
gradient: the largest gradient of a layer's output is known to the backward pass only.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from examples.llama import mesh
from examples.llama.config import Config
from examples.llama.model import Llama
from fbq_jax import fallback_stats

EVAL_BATCHES = 8

PyTree = Any


@flax.struct.dataclass
class TrainState:
    """What a step reads and replaces, and what a checkpoint holds.

    Attributes:
        step: int32 [], the number of steps taken.
        params: The master weights, float32.
        fallback: The state of layers in INT8; empty for others.
        overwritten: That of layers in FP8 with delayed scaling; empty for others.
        opt_state: The optimizer's moments, float32.
    """

    step: jax.Array
    params: PyTree
    fallback: PyTree
    overwritten: PyTree
    opt_state: optax.OptState

    def variables(self) -> dict[str, PyTree]:
        """What the model takes."""
        return {
            "params": self.params,
            "fallback": self.fallback,
            OVERWRITE_WITH_GRADIENT: self.overwritten,
        }

    def stats(self) -> dict[str, Any]:
        """Rate, theta and count of each quantized layer, on the host."""
        return jax.device_get(fallback_stats({"fallback": self.fallback}))


def make_optimizer(
    config: Config,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW with clipping; its learning rate warms up, then falls along a cosine."""
    return _optimizer(config.steps, config.lr, config.clip)


# The same objects for the same numbers, so that runs that differ in other things share
# one compiled step.
@functools.lru_cache(maxsize=4)
def _optimizer(
    steps: int, lr: float, clip: float
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    warmup = steps // 10
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=lr / (warmup + 1),
        peak_value=lr,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=lr / 10,
    )

    def is_matrix(path: tuple[Any, ...], _: jax.Array) -> bool:
        # Not by rank: the layers' norms and biases are stacked to matrices, too.
        return path[-1].key in ("kernel", "embedding")

    optimizer = optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(),
        optax.adamw(
            schedule,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            mask=partial(jax.tree.map_with_path, is_matrix),
        ),
    )
    return optimizer, schedule


def init_state(
    model: Llama,
    optimizer: optax.GradientTransformation,
    weights: PyTree | None,
    seed: int,
) -> TrainState:
    """The state before the first step, on the devices of the mesh in use."""
    init, key = _initializer(model, optimizer), jax.random.key(seed)
    # Bound to its devices, as a restored state is, so that both run one program.
    shardings = mesh.shardings(jax.eval_shape(init, key, weights))
    if weights is not None:
        weights = jax.tree.map(jax.device_put, weights, shardings.params)
    return jax.jit(init, out_shardings=shardings)(key, weights)


# The same function for the same model, so that runs one after another compile it once.
@functools.lru_cache(maxsize=4)
def _initializer(
    model: Llama, optimizer: optax.GradientTransformation
) -> Callable[[jax.Array, PyTree | None], TrainState]:
    def init(key: jax.Array, weights: PyTree | None) -> TrainState:
        variables = model.init(key, jnp.zeros((1, 1), jnp.int32))
        # A copy: a step overwrites the memory of the state it is given.
        params = (
            variables["params"] if weights is None else jax.tree.map(jnp.copy, weights)
        )
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            fallback=variables.get("fallback", {}),
            overwritten=variables.get(OVERWRITE_WITH_GRADIENT, {}),
            opt_state=optimizer.init(params),
        )

    return init


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over the tokens, in nats: float32 [B, S, V], int32 [B, S] -> float32 []."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@functools.lru_cache(maxsize=4)
def make_train_step(
    model: Llama, optimizer: optax.GradientTransformation, schedule: optax.Schedule
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, Any]]]:
    """Returns the jitted step (state, int32 tokens [N, B/N, S+1]) -> state, metrics.

    It averages the gradients of the N microbatches. Each moves the layers' state, which
    goes from one to the next. The old state is donated.
    """

    def loss_fn(
        differentiated: dict[str, PyTree], fallback: PyTree, tokens: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        logits, updates = model.apply(
            {**differentiated, "fallback": fallback},
            tokens[:, :-1],
            mutable=["fallback"],
        )
        return cross_entropy(logits, tokens[:, 1:]), updates.get("fallback", {})

    @partial(jax.jit, donate_argnums=0)
    def train_step(
        state: TrainState, tokens: jax.Array
    ) -> tuple[TrainState, dict[str, Any]]:
        def microbatch(
            carry: tuple[PyTree, PyTree, PyTree], tokens: jax.Array
        ) -> tuple[tuple[PyTree, PyTree, PyTree], jax.Array]:
            fallback, overwritten, total = carry
            differentiated = {
                "params": state.params,
                OVERWRITE_WITH_GRADIENT: overwritten,
            }
            (loss, fallback), grads = jax.value_and_grad(loss_fn, has_aux=True)(
                differentiated, fallback, tokens
            )
            # Reduced to the shard of each device here, and not for the norm as a whole.
            total = mesh.constrain(optax.tree.add(total, grads["params"]))
            return (fallback, grads[OVERWRITE_WITH_GRADIENT], total), loss

        zeros = optax.tree.zeros_like(state.params)
        (fallback, overwritten, total), losses = jax.lax.scan(
            microbatch, (state.fallback, state.overwritten, zeros), tokens
        )
        grads = optax.tree.scale(1 / tokens.shape[0], total)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            fallback=fallback,
            overwritten=overwritten,
            opt_state=opt_state,
        )
        new = mesh.constrain(new)
        stats = fallback_stats({"fallback": new.fallback})
        return new, {
            "loss": losses.mean(),
            "lr": schedule(state.step),
            "grad_norm": optax.tree.norm(grads),
            # Measured here: the next step takes the state and its memory away.
            "fallback": {
                layer: {"rate": of_layer.rate, "theta": of_layer.theta}
                for layer, of_layer in stats.items()
            },
        }

    return train_step


def make_eval(model: Llama, data: Sequence[Any]) -> Callable[[TrainState], float]:
    """Returns the validation: state -> mean loss over the same batches every time."""

    def evaluate(state: TrainState) -> float:
        tokens = (mesh.distribute(data[i], "batch", None) for i in range(EVAL_BATCHES))
        losses = [_val_loss(model, state.variables(), batch) for batch in tokens]
        return float(jnp.stack(losses).mean())

    return evaluate


@partial(jax.jit, static_argnums=0)
def _val_loss(
    model: Llama, variables: dict[str, PyTree], tokens: jax.Array
) -> jax.Array:
    # Nothing is mutable here, so the thresholds stay where they are.
    logits: Any = model.apply(variables, tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])
