"""Weak scaling of a mixture of experts whose experts are shared out among devices.

Each device has as many tokens as one device alone would have.  The *efficiency* is the
tokens per second of N devices over N times the tokens per second of one device.
"""

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import recipes
from fbq_jax.bench import layers, measure, moe
from fbq_jax.bench.measure import Effort, RunningStep
from fbq_jax.bench.results import Row, row
from fbq_jax.core.expert_plan import ExpertSharding
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.ops import dispatch

#: ``(tokens of a device, D, F, experts, experts of a token)``.
SHAPES = moe.SHAPES
AXIS = "expert"
# The largest difference of N devices from one.  XLA may sum the router's products in
# another order, so a token may get another of two experts with nearly equal scores.
# The rows after it then draw other noise, which changes dX and dW: one token of 512 an
# expert changes dW by 3 %.
_LIMITS = {"y": 0.02, "dx": 0.04, "dw": 0.1}


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures steps like those of the section ``moe`` on one device and on several.

    The numbers of devices are the powers of two up to all of them.

    Raises:
      WrongResultError: results of several devices differ from those of one device that
        has all tokens.
    """
    choice = dispatch.choose(
        "ragged_matmul", moe.BLOCK_SHAPE, implementation=implementation
    )
    for shape in shapes:
        for name in layers.RECIPES:
            yield from _rows(name, shape, choice, effort)


def _rows(
    name: str, of_device: tuple[int, ...], choice: dispatch.Choice, effort: Effort
) -> Iterator[Row]:
    """One recipe on each number of devices."""
    alone = None  # tokens per second of one device
    for number in [2**i for i in range(jax.device_count().bit_length())]:
        shape = (of_device[0] * number, *of_device[1:])
        exact = moe.settled(_start(name, shape, choice, 1)[1]) if number > 1 else None
        program, step = _start(name, shape, choice, number)
        results = moe.settled(step)
        errors: dict[str, float] = {}
        if exact is not None:
            exact = jax.device_put(exact, tuple(result.sharding for result in results))
            what = f"{name} at {shape} on {number} devices"
            errors = measure.checked_errors(_LIMITS, results, exact, what)
        timing = measure.running_timing(step, effort=effort)
        speed = shape[0] / timing.ms * 1e3
        alone = alone or speed
        yield row(
            timing,
            moe.work(shape),
            what=name,
            implementation=choice.backend,
            shape=shape,
            mesh=f"{AXIS}={number}",
            fallback=mean_rate(step.state) if program.falls_back else None,
            tokens_s=speed,
            efficiency=speed / (number * alone),
            errors=errors,
            compile_s=program.compile_s,
        )


def _start(
    name: str, shape: tuple[int, ...], choice: dispatch.Choice, number: int
) -> tuple[moe.Program, RunningStep]:
    """A recipe's compiled program on a number of devices, and its running step."""
    mesh = jax.make_mesh((number,), (AXIS,), axis_types=(AxisType.Auto,))
    dot = FallbackDot(recipes.NAMED[name], implementation=choice.implementation)
    with jax.set_mesh(mesh):
        operands = _sharded(moe.make_operands(shape), mesh)
        sharding = ExpertSharding(AXIS) if number > 1 else None
        program = moe.compile_step(name, choice.backend, shape, dot, operands, sharding)
    return program, RunningStep(program.step, program.state, *operands)


def _sharded(operands: moe.Operands, mesh: Mesh) -> moe.Operands:
    """Shards the tokens and the experts' parameters; the router's are copied."""

    def put(x: jax.Array, axes: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, axes))

    params, x, dy = operands
    params = jax.tree.map(lambda p: put(p, P(AXIS) if p.ndim == 3 else P()), params)
    return params, put(x, P(AXIS)), put(dy, P(AXIS))
