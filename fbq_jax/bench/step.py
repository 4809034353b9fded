"""A training step of Flax layers in wall-clock time: what users of the library get."""

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from fbq_jax.bench import data, layers, matmuls
from fbq_jax.bench.compare import Comparison, Program, compile_all
from fbq_jax.bench.layers import Stack
from fbq_jax.bench.measure import Effort, RunningStep
from fbq_jax.bench.results import Row

# (tokens, D, F). Other INT8 libraries, which compile for long, take the first.
SHAPES = (
    (8192, 4096, 4096),
    (8192, 2048, 2048),
    (8192, 4096, 14336),
)
DEPTH = 8  # layers
# Until thresholds stay in their range, and delayed scales have reached the first layer.
SETTLING_STEPS = 16
# The limits of the errors through all layers. Of an update that has nothing to do with
# bf16's, the error is 1 or more.
_LIMITS = {"loss": 0.2, "update": 0.5}
# The standard deviations of the scales' logarithms, of tokens and of channels. They
# make some blocks of every layer's activation several times as large as others.
_SPREAD = 0.5


def rows(
    shapes: Sequence[tuple[int, ...]],
    depth: int = DEPTH,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures steps of layers from D to F and back, for each ``(tokens, D, F)``.

    A step is forward, gradient and SGD update of float32 weights, computed in bf16,
    always on the same tokens. Work counts the layers' products; there is no dX of the
    first one. The loss and an update are checked against bf16's.
    """
    stacks = _stacks(depth, implementation)
    libraries = list(layers.installed_int8_libraries(depth))
    for i, shape in enumerate(shapes):
        yield from Comparison(
            shape,
            work(shape, depth),
            inputs(shape),
            _LIMITS,
            SETTLING_STEPS,
            results=_loss_and_update,
            checks_rates=True,
        ).rows(compiled(stacks if i else stacks + libraries, shape, depth), effort)


def _stacks(depth: int, implementation: str | None) -> list[Stack]:
    """What is measured for every shape; bf16 is the first."""
    named = layers.linen(depth, implementation, matmuls.TIMED)
    nnx = layers.nnx_stack("fallback", implementation)
    kept = layers.linen(depth, implementation, keeps_codes=True)
    return [layers.bf16(depth), layers.flax_fp8(depth), *named, *kept, nnx]


def compiled(
    stacks: Sequence[Stack], shape: tuple[int, ...], depth: int
) -> list[Program]:
    """The training steps of stacks for ``(tokens, D, F)``."""
    x, key = jax.eval_shape(functools.partial(inputs, shape))
    args = layers.training_step, functools.partial(kernels, shape, depth), x, key
    return compile_all([functools.partial(stack.program, *args) for stack in stacks])


def _loss_and_update(step: RunningStep) -> tuple[jax.Array, ...]:
    """Runs a step; returns its loss and the update of the first layer."""
    before = jnp.copy(layers.first_kernel(step.state))
    loss = step()
    return loss, layers.first_kernel(step.state) - before


def work(shape: tuple[int, ...], depth: int) -> float:
    """Operations of a step: three products a layer, but two in the first."""
    tokens, D, F = shape
    return 2.0 * tokens * D * F * (3 * depth - 1)


def inputs(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The activation and a key for noise, of ``(tokens, D, F)``."""
    keys = jax.random.split(jax.random.key(0), 3)
    return _activation(keys[0], shape[:2]), keys[1]


def kernels(shape: tuple[int, ...], depth: int) -> list[jax.Array]:
    """The layers' kernels in float32, ``[D, F]``, ``[F, D]``, ..."""
    _, D, F = shape
    keys = jax.random.split(jax.random.split(jax.random.key(0), 3)[2], depth)
    shapes = itertools.cycle(((D, F), (F, D)))
    return [_kernel(*pair) for pair in zip(keys, shapes, strict=False)]


@functools.partial(jax.jit, static_argnums=1)
def _activation(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A bf16 array ``[tokens, channels]`` with heavy tails, also among tokens."""
    x_key, scale_key = jax.random.split(key)
    scales = _scales(scale_key, (shape[0], 1))
    return data.activation(x_key, shape) * scales.astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def _kernel(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A kernel whose outputs have many scales."""
    w_key, scale_key = jax.random.split(key)
    scales = _scales(scale_key, (1, shape[1]))
    return jax.random.normal(w_key, shape) * shape[0] ** -0.5 * scales


def _scales(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Log-normal scales whose mean square is 1."""
    return jnp.exp(_SPREAD * jax.random.normal(key, shape) - _SPREAD**2)
