"""How long a program takes on the device, and whether it computes what it should.

A GPU under its power limit slows down within a second of heavy work: one fast launch
says little about training.  So there are two figures.  *Sustained* is the time of a
call among many, back to back, after a warm-up: what training sees, launches and gaps
included.  *Burst* is the time of a call's kernels on a rested card: what the code could
do where power and host are no limit.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp


class WrongResultError(Exception):
    """A program's result is not what it should be: nothing is timed."""


class NoKernelsError(Exception):
    """The profiler does not tell the kernels of a program apart."""


class Effort(NamedTuple):
    """How much measuring one figure takes.

    Attributes:
      warm_up_s: seconds of continuous calls before the first sample.
      samples: number of samples of the sustained time.
      batch_s: the least seconds of a sample, a batch of calls.
      rest_s: seconds without a call before a burst.
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
    """Medians, in milliseconds a call.

    Attributes:
      ms: sustained.
      burst_ms: in a burst.
      burst_of: what ``burst_ms`` covers: ``"kernels"``, their time on the GPU's clock,
        or, where that cannot be had, ``"calls"``, launch and host included.
    """

    ms: float
    burst_ms: float
    burst_of: Literal["kernels", "calls"]


def first_call(
    function: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], float]:
    """Compiles a function for its arguments and calls it once.

    Returns:
      The compiled function, and the seconds from tracing to the first result.  A kernel
      that this process has compiled before, for another program, counts little.
    """
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return compiled, time.perf_counter() - start


def first_step(
    step: Any, state: Any, *args: Any
) -> tuple[jax.stages.Compiled, float, Any]:
    """As ``first_call``, for a jitted ``(state, *args) -> (state, metrics)``.

    Returns:
      The compiled step, seconds, and the state after it: the old one may be gone.
    """
    start = time.perf_counter()
    compiled = step.lower(state, *args).compile()
    state, metrics = compiled(state, *args)
    jax.block_until_ready(metrics)
    return compiled, time.perf_counter() - start, state


def loop(
    step: Callable[..., Any], state: Any, *args: Any, effort: Effort
) -> tuple[Timing, Any]:
    """Measures a step whose state goes from one call to the next.

    A burst is of calls: several states at once may be more than memory holds.
    """

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, *args)
        return metrics

    sustained = _sustained(call, (), effort)
    time.sleep(effort.rest_s)
    calls = [_batch(call, (), 1) for _ in range(effort.launches)]
    return Timing(sustained, 1e3 * statistics.median(calls), "calls"), state


def timing(function: Callable[..., Any], *args: Any, effort: Effort) -> Timing:
    """Times a compiled or jitted function."""
    jax.block_until_ready(function(*args))
    sustained = _sustained(function, args, effort)
    time.sleep(effort.rest_s)
    kernels = _kernel_times(function, args, effort.launches)
    if kernels is not None:
        return Timing(sustained, statistics.median(kernels), "kernels")
    calls = [_batch(function, args, 1) for _ in range(effort.launches)]
    return Timing(sustained, 1e3 * statistics.median(calls), "calls")


def kernels(compiled: Any, *args: Any) -> list[tuple[str, float]]:
    """The kernels of one call of a compiled program, and their milliseconds.

    Raises:
      NoKernelsError: on a machine without CUPTI.
    """
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, times = profiler.measure(compiled, aggregate=False)(*args)
    except RuntimeError as error:
        raise NoKernelsError(f"kernels cannot be measured here: {error}") from error
    return times or []


def relative_error(actual: jax.Array, exact: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``exact``, in float32."""
    return float(_relative_error(actual, exact))


def require(error: float, limit: float, what: str) -> None:
    """Refuses to go on with a wrong result.

    Raises:
      WrongResultError: if the error is NaN or above the limit.
    """
    if not error <= limit:
        raise WrongResultError(
            f"{what} is wrong: its error against the definition is {error:.1e}, "
            f"at most {limit:.0e} is right; nothing was timed"
        )


@jax.jit
def _relative_error(actual: jax.Array, exact: jax.Array) -> jax.Array:
    exact = exact.astype(jnp.float32)
    difference = actual.astype(jnp.float32) - exact
    return jnp.linalg.norm(difference) / jnp.linalg.norm(exact)


def _sustained(
    function: Callable[..., Any], args: tuple[Any, ...], effort: Effort
) -> float:
    end = time.perf_counter() + effort.warm_up_s
    calls, seconds = 1, 0.0
    while time.perf_counter() < end or seconds < effort.batch_s:
        if seconds < effort.batch_s:
            calls *= 2
        seconds = _batch(function, args, calls)
    samples = [_batch(function, args, calls) / calls for _ in range(effort.samples)]
    return 1e3 * statistics.median(samples)


def _batch(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """Seconds of calls one after the other; the device runs them in that order."""
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*args)
    jax.block_until_ready(out)
    return time.perf_counter() - start


def _kernel_times(
    function: Callable[..., Any], args: tuple[Any, ...], launches: int
) -> list[float] | None:
    """Milliseconds of the kernels of each launch; None where nothing can tell them."""
    if jax.default_backend() != "gpu":
        return None
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, times = profiler.measure(function, iterations=launches)(*args)
    except RuntimeError:  # no CUPTI, or kernels that are not the same each time
        return None
    return times  # None where no kernel ran, as in a copy
