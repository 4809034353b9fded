"""Times programs on the device and checks their results.

Under heavy work a GPU reaches its power limit and slows down within a second, so a
single fast launch says little about training. Two times are measured:

- *Sustained*: the time per call of many calls back to back, after a warm-up. This is
  what training sees, launches and gaps included.
- *Burst*: the time of one call's kernels on a rested GPU. Neither power nor the host
  limits it.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp


class WrongResultError(Exception):
    """A program's result is wrong, so its time is not reported."""


class NoKernelsError(Exception):
    """The profiler cannot time single kernels on this machine."""


class Effort(NamedTuple):
    """How much time a measurement takes.

    Attributes:
      warm_up_s: seconds of continuous calls before the first sample.
      samples: number of samples of the sustained time.
      batch_s: minimum seconds of a sample, which is a batch of calls.
      rest_s: idle seconds before a burst.
      launches: number of calls of a burst.
    """

    warm_up_s: float
    samples: int
    batch_s: float
    rest_s: float
    launches: int


FULL = Effort(warm_up_s=0.5, samples=20, batch_s=0.01, rest_s=0.5, launches=10)
QUICK = Effort(warm_up_s=0.2, samples=10, batch_s=0.01, rest_s=0.2, launches=5)


class Timing(NamedTuple):
    """Median milliseconds per call.

    Attributes:
      ms: sustained.
      burst_ms: in a burst.
      burst_of: what ``burst_ms`` covers: ``"kernels"``, timed by the GPU, or
        ``"calls"``, with launch and host time, where kernels cannot be timed.
    """

    ms: float
    burst_ms: float
    burst_of: Literal["kernels", "calls"]


def first_call(
    function: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], float]:
    """Compiles a function for its arguments and calls it once.

    Returns:
      The compiled function, and the seconds from tracing to the first result. A kernel
      that this process has compiled for another program adds little.
    """
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return compiled, time.perf_counter() - start


def first_step(
    step: Any, state: Any, *args: Any
) -> tuple[jax.stages.Compiled, float, Any]:
    """Compiles a jitted ``(state, *args) -> (state, metrics)`` and calls it once.

    Returns:
      The compiled step, the seconds as in ``first_call``, and the new state. The old
      state may have been donated.
    """
    start = time.perf_counter()
    compiled = step.lower(state, *args).compile()
    state, metrics = compiled(state, *args)
    jax.block_until_ready(metrics)
    return compiled, time.perf_counter() - start, state


def timing(function: Callable[..., Any], *args: Any, effort: Effort) -> Timing:
    """Times a compiled or jitted function."""
    jax.block_until_ready(function(*args))
    sustained = _sustained(function, args, effort)
    time.sleep(effort.rest_s)
    kernels = _kernel_times(function, args, effort.launches)
    if kernels is not None:
        return Timing(sustained, statistics.median(kernels), "kernels")
    return Timing(sustained, _burst_of_calls(function, args, effort), "calls")


def step_timing(
    step: Callable[..., Any], state: Any, *args: Any, effort: Effort
) -> Timing:
    """Times a step ``(state, *args) -> (state, metrics)`` that donates its state.

    The burst times calls, since memory may not hold the states of several at once.
    """

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, *args)
        return metrics

    sustained = _sustained(call, (), effort)
    time.sleep(effort.rest_s)
    return Timing(sustained, _burst_of_calls(call, (), effort), "calls")


def kernels(compiled: Any, *args: Any) -> list[tuple[str, float]]:
    """The names and milliseconds of the kernels of one call of a compiled program.

    Raises:
      NoKernelsError: if the machine has no CUPTI.
    """
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, times = profiler.measure(compiled, aggregate=False)(*args)
    except RuntimeError as error:
        raise NoKernelsError(f"kernels cannot be measured here: {error}") from error
    return times or []


def relative_error(actual: jax.Array, exact: jax.Array) -> float:
    """``||actual - exact|| / ||exact||`` in the Frobenius norm, in float32."""
    return float(_relative_error(actual, exact))


def require(error: float, limit: float, what: str) -> None:
    """Checks an error against its limit.

    Raises:
      WrongResultError: if the error is NaN or above the limit.
    """
    if not error <= limit:
        raise WrongResultError(
            f"{what} is wrong: its error is {error:.1e}, the limit is {limit:.0e}; "
            "its time is not reported"
        )


@jax.jit
def _relative_error(actual: jax.Array, exact: jax.Array) -> jax.Array:
    exact = exact.astype(jnp.float32)
    difference = actual.astype(jnp.float32) - exact
    return jnp.linalg.norm(difference) / jnp.linalg.norm(exact)


def _sustained(
    function: Callable[..., Any], args: tuple[Any, ...], effort: Effort
) -> float:
    """Median milliseconds per call; warms up and finds the calls of a batch first."""
    end = time.perf_counter() + effort.warm_up_s
    calls, seconds = 1, 0.0
    while time.perf_counter() < end or seconds < effort.batch_s:
        if seconds < effort.batch_s:
            calls *= 2
        seconds = _seconds(function, args, calls)
    samples = [_seconds(function, args, calls) / calls for _ in range(effort.samples)]
    return 1e3 * statistics.median(samples)


def _burst_of_calls(
    function: Callable[..., Any], args: tuple[Any, ...], effort: Effort
) -> float:
    """Median milliseconds of single calls."""
    calls = [_seconds(function, args, 1) for _ in range(effort.launches)]
    return 1e3 * statistics.median(calls)


def _seconds(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """Seconds that several calls take; the device runs them in order."""
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*args)
    jax.block_until_ready(out)
    return time.perf_counter() - start


def _kernel_times(
    function: Callable[..., Any], args: tuple[Any, ...], launches: int
) -> list[float] | None:
    """Milliseconds of each launch's kernels; None where they cannot be timed."""
    if jax.default_backend() != "gpu":
        return None
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, times = profiler.measure(function, iterations=launches)(*args)
    except RuntimeError:  # There is no CUPTI, or the kernels differ between launches.
        return None
    return times  # None if no kernel ran, as in a copy.
