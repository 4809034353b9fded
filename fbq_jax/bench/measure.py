"""Times programs on the device and checks their results.

Under heavy work a GPU reaches its power limit and slows down within a second, so a
single fast launch says little about training. Two times are measured:

- *Sustained*: the time per call of many calls back to back, after a warm-up. This is
  what training sees, launches and gaps included.
- *Burst*: the time of one call's kernels on a rested GPU. Neither power nor the host
  limits it. Of steps whose state moves, a burst times a few calls back to back, with
  what the host takes to start the first one.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp


class WrongResultError(Exception):
    """A program's result is wrong, so its time is not reported."""


class UnsupportedError(Exception):
    """A section or a figure cannot be measured on this machine."""


class NoKernelsError(UnsupportedError):
    """The profiler cannot time single kernels on this machine."""


class Effort(NamedTuple):
    """How much time a measurement takes."""

    warm_up_s: float  # of continuous calls before the first sample
    samples: int  # of the sustained time
    batch_s: float  # the least of a sample, which is a batch of calls
    rest_s: float  # before a burst
    launches: int  # the calls of a burst


# Long batches: the device waits for the host at the start of each one.
FULL = Effort(warm_up_s=0.5, samples=8, batch_s=0.25, rest_s=0.5, launches=20)
QUICK = Effort(warm_up_s=0.2, samples=5, batch_s=0.05, rest_s=0.2, launches=5)
_BURSTS = 5


class Timing(NamedTuple):
    """Median milliseconds per call."""

    ms: float  # sustained
    burst_ms: float  # in a burst
    # Kernels are timed by the GPU; calls include launches and the host's time.
    burst_of: Literal["kernels", "calls"]


def first_call(function: Any, *args: Any) -> tuple[jax.stages.Compiled, float, Any]:
    """Compiles a jitted function; also the seconds to its first result, and that.

    A kernel that this process has compiled for another program adds little to them.
    """
    start = time.perf_counter()
    compiled = function.lower(*args).compile()
    result = jax.block_until_ready(compiled(*args))
    return compiled, time.perf_counter() - start, result


class RunningStep(jax.stages.Compiled):
    """A step ``(state, *inputs) -> (state, results)`` that may donate its state.

    A call goes on from the state that the call before left, and returns the results.
    The profiler takes only jitted and compiled functions, so this is one.
    """

    def __init__(self, step: Callable[..., Any], state: Any, *inputs: Any) -> None:
        self.step, self.state, self._inputs = step, state, inputs

    def __call__(self) -> Any:
        """Runs one step and returns its results."""
        self.state, results = self.step(self.state, *self._inputs)
        return results


def timing(
    function: Callable[..., Any],
    *args: Any,
    effort: Effort,
    burst_of: Literal["kernels", "calls"] = "kernels",
) -> Timing:
    """Times a compiled or jitted function, or a ``RunningStep``.

    Bursts time calls where kernels cannot be timed.
    """
    call = functools.partial(function, *args)
    jax.block_until_ready(call())
    sustained = _sustained(call, effort)
    if burst_of == "kernels":
        time.sleep(effort.rest_s)
        with contextlib.suppress(NoKernelsError):
            # There are no times if no kernel ran, as in a copy.
            if times := _profile(function, args, iterations=effort.launches):
                return Timing(sustained, statistics.median(times), "kernels")
    seconds = []
    for _ in range(_BURSTS):
        time.sleep(effort.rest_s)
        seconds.append(_seconds(call, effort.launches) / effort.launches)
    return Timing(sustained, 1e3 * statistics.median(seconds), "calls")


def step_timing(
    step: Callable[..., Any], state: Any, *args: Any, effort: Effort
) -> Timing:
    """Times a step ``(state, *args) -> (state, metrics)`` that donates its state.

    Its bursts are of calls.
    """
    running = RunningStep(step, state, *args)
    return timing(running, effort=effort, burst_of="calls")


def kernels(compiled: Any, *args: Any) -> list[tuple[str, float]]:
    """The names and milliseconds of the kernels of one call of a compiled program.

    Raises NoKernelsError without a GPU or CUPTI.
    """
    times: list[tuple[str, float]] = _profile(compiled, args, aggregate=False) or []
    return times


def _profile(function: Any, args: tuple[Any, ...], **options: Any) -> Any:
    """What JAX's profiler measures of a function, in milliseconds."""
    if (backend := jax.default_backend()) != "gpu":
        raise NoKernelsError(f"kernels cannot be measured on a {backend}")
    from jax.experimental.mosaic.gpu import profiler

    try:
        # It compiles what is not a jitted function, with bound arguments as constants.
        return profiler.measure(function, **options)(*args)[1]
    except RuntimeError as error:  # no CUPTI, or kernels differ between launches
        raise NoKernelsError(f"kernels cannot be measured here: {error}") from error


@jax.jit
def _relative_error(actual: jax.Array, exact: jax.Array) -> jax.Array:
    exact = exact.astype(jnp.float32)
    difference = actual.astype(jnp.float32) - exact
    return jnp.linalg.norm(difference) / jnp.linalg.norm(exact)


def relative_error(actual: jax.Array, exact: jax.Array) -> float:
    """``||actual - exact|| / ||exact||`` in the Frobenius norm, in float32."""
    return float(_relative_error(actual, exact))


def checked_errors(
    limits: Mapping[str, float],
    actual: Sequence[jax.Array],
    exact: Sequence[jax.Array],
    what: str,
) -> dict[str, float]:
    """The relative errors of arrays by name, in the order of ``limits``."""
    errors = {}
    for (name, limit), *pair in zip(limits.items(), actual, exact, strict=True):
        errors[name] = relative_error(*pair)
        require(errors[name], limit, f"{name} of {what}")
    return errors


def require(error: float, limit: float, what: str) -> None:
    """Raises WrongResultError if an error is NaN or above its limit."""
    if not error <= limit:
        raise WrongResultError(
            f"{what} is wrong: its error is {error:.1e}, the limit is {limit:.0e}; "
            "its time is not reported"
        )


def _sustained(call: Callable[[], Any], effort: Effort) -> float:
    """Median milliseconds per call; warms up and finds the calls of a batch first."""
    end = time.perf_counter() + effort.warm_up_s
    calls, seconds = 1, 0.0
    while time.perf_counter() < end or seconds < effort.batch_s:
        if seconds < effort.batch_s:
            calls *= 2
        seconds = _seconds(call, calls)
    samples = [_seconds(call, calls) / calls for _ in range(effort.samples)]
    return 1e3 * statistics.median(samples)


def _seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds that several calls take; the device runs them in order."""
    start = time.perf_counter()
    for _ in range(calls):
        out = call()
    jax.block_until_ready(out)
    return time.perf_counter() - start
