"""The time of each kernel of a training step of Flax layers."""

from collections.abc import Iterator, Sequence

from fbq_jax.bench import layers, measure, step
from fbq_jax.bench.kernel_rows import kernel_rows
from fbq_jax.bench.measure import Effort, RunningStep
from fbq_jax.bench.results import Row

SHAPES = ((8192, 4096, 14336),)


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each kernel of the steps of ``step``, for each ``(tokens, D, F)``.

    A step is profiled after continuous ones, with the GPU at its power limit.  The rows
    are those of ``kernel_rows``.

    Raises:
      NoKernelsError: if the profiler cannot time single kernels.
    """
    stacks = [
        layers.bf16(step.DEPTH),
        layers.flax_fp8(step.DEPTH),
        *layers.linen(step.DEPTH, implementation),
    ]
    for shape in shapes:
        x, key, kernels = step.operands(shape, step.DEPTH)
        for stack in stacks:
            program = step.compile_stack(stack, shape, step.DEPTH)
            running = RunningStep(program.step, stack.start(kernels), x, key)
            for _ in range(step.SETTLING_STEPS):
                running()
            yield from kernel_rows(
                measure.running_kernels(running, warm_up_s=effort.warm_up_s),
                what=stack.name,
                implementation=stack.backend,
                shape=shape,
            )
