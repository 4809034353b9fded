"""Measures several programs that compute the same, in one run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax

from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort, RunningStep
from fbq_jax.bench.results import Row, row, with_ratios

_THREADS = 8  # that compile
_STEPS_INTO_RANGE = 4

Results = Sequence[jax.Array]


@dataclass(frozen=True)
class Program:
    """One way to compute what is compared."""

    what: str  # the recipe or library, as a row names it
    implementation: str  # the backend that computes the products
    # The compiled function ``(state, *inputs) -> (new state, results)``.
    step: Callable[..., tuple[Any, Any]]
    start: Callable[[], Any]  # makes the first state, which ``step`` may donate
    compile_s: float  # seconds of tracing and compilation
    # The layers' fallback rates in the last step, from its state, and their range.
    rates: Callable[[Any], Sequence[float]] = lambda _: ()
    target_rate: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Comparison:
    """What all programs compute, and how they are measured."""

    shape: tuple[int, ...]  # the sizes, as ``report.HEADINGS`` names them
    work: float  # operations of a step
    inputs: tuple[Any, ...]  # the arguments of a step after the state
    limits: Mapping[str, float]  # the largest errors of the results, in order, by name
    settling_steps: int = 1  # before results are checked and a step is timed
    # Runs the last of these steps and returns what is checked.
    results: Callable[[RunningStep], Results] = RunningStep.__call__
    exact: Results = ()  # what results are compared with; else the first program's
    checks_rates: bool = False  # whether all fallback rates must be in their range
    burst_of: Literal["kernels", "calls"] = "calls"  # what a burst times

    def rows(self, programs: Sequence[Program], effort: Effort) -> Iterator[Row]:
        """The row of each program; the first one is the baseline.

        Raises WrongResultError for an error above its limit or a rate out of range.
        """
        return with_ratios(self._rows(programs, effort))

    def _rows(self, programs: Sequence[Program], effort: Effort) -> Iterator[Row]:
        exact = self.exact
        for program in programs:
            measured, exact = self._measure(program, exact, effort)
            yield measured

    def _measure(
        self, program: Program, exact: Results, effort: Effort
    ) -> tuple[Row, Results]:
        """The row of a program, and what the next one is compared with."""
        what = f"{program.what} at {self.shape}"
        step = RunningStep(program.step, program.start(), *self.inputs)
        for _ in range(self.settling_steps - 1):
            step()
        results = self.results(step)
        exact = exact or results
        errors = measure.checked_errors(self.limits, results, exact, what)
        del results  # may take much memory
        timing = measure.timing(step, effort=effort, burst_of=self.burst_of)
        if self.checks_rates:
            require_rates(program, step, what)
        rates = program.rates(step.state)
        measured = row(
            timing,
            self.work,
            what=program.what,
            implementation=program.implementation,
            shape=self.shape,
            fallback=sum(rates) / len(rates) if rates else None,
            errors=errors,
            compile_s=program.compile_s,
        )
        return measured, exact


def require_rates(program: Program, step: RunningStep, what: str) -> None:
    """Raises WrongResultError unless the fallback rates of all layers are in range.

    As weights change, a rate leaves the range for single steps: then its threshold
    moves. So this runs a few steps more if they are needed.
    """
    low, high = program.target_rate
    for _ in range(_STEPS_INTO_RANGE + 1):
        rates = program.rates(step.state)
        if all(low <= rate <= high for rate in rates):
            return
        step()
    raise measure.WrongResultError(
        f"{what} has layers with fallback rates from {min(rates):.1%} to "
        f"{max(rates):.1%}, outside the recipe's range of {low:.1%} to {high:.1%}; its "
        "time is not reported"
    )


def compile_step(step: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Compiles a step that donates its state; returns it and the seconds it took.

    A kernel that this process has compiled for another program adds little to them.
    """
    start = time.perf_counter()
    # Without ``keep_unused``, state that a step does not read would not be donated:
    # the buffers of other state would move, and CUDA graphs with them.
    jitted = jax.jit(step, donate_argnums=0, keep_unused=True)
    compiled = jitted.lower(*args).compile()
    return compiled, time.perf_counter() - start


def compile_all(compilations: Sequence[Callable[[], Program]]) -> list[Program]:
    """Compiles the first program, then all others at the same time.

    XLA chooses the kernels of the first one, which is in bf16, by timing them.
    """
    first, *others = compilations
    with ThreadPoolExecutor(_THREADS) as pool:
        return [first(), *pool.map(lambda compilation: compilation(), others)]
