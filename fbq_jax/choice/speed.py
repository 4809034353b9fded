"""The time of a layer's three products on this device, in float and by recipe."""

from collections.abc import Iterable, Mapping, Sequence

import jax

from fbq_jax.choice.recording import Sizes

_DEPTH = 4  # layers of a step that is timed, from K to N and back
_SETTLING_STEPS = 4


def measure_shapes(
    shapes: Iterable[Sizes], names: Sequence[str]
) -> Mapping[Sizes, Mapping[str, float]]:
    """Milliseconds of a layer's training step by name, ``"bf16"`` among them.

    Each shape ``(M, K, N)`` is timed once, as ``python -m fbq_jax.bench step`` does.
    Nothing is measured on a CPU, where INT8 is not faster.
    """
    if jax.default_backend() != "gpu":
        return {}
    # Not with the library, which does not need them.
    from fbq_jax.bench import layers, measure, step
    from fbq_jax.bench.measure import RunningStep

    stacks = [layers.bf16(_DEPTH), *layers.linen(_DEPTH, None, names)]
    times: dict[Sizes, dict[str, float]] = {}
    for shape in shapes:
        M, K, N = shape
        key = M, min(K, N), max(K, N)
        programs = step.compiled(stacks, key, _DEPTH)
        times[shape] = {}
        for program in programs:
            running = RunningStep(program.step, program.start(), *step.inputs(key))
            for _ in range(_SETTLING_STEPS):
                running()
            timing = measure.timing(running, effort=measure.QUICK, burst_of="calls")
            times[shape][program.what] = timing.ms / _DEPTH
    return times
