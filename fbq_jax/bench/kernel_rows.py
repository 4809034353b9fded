"""The kernels of a program as rows of results."""

import collections
from collections.abc import Iterator, Sequence

from fbq_jax.bench.measure import Timing
from fbq_jax.bench.results import Row

_MIN_SHARE = 0.005  # Kernels with a smaller share of the time are added up in one row.


def kernel_rows(
    kernels: Sequence[tuple[str, float]],
    *,
    what: str,
    implementation: str,
    shape: tuple[int, ...],
) -> Iterator[Row]:
    """Makes rows of a program's kernels.

    The first row is the whole program.  One row per kernel name follows, by time; its
    rate is its percentage of the program's time.

    Args:
      kernels: the names and milliseconds of the kernels, as ``measure.kernels`` returns
        them.
      what: the name of the program.
      implementation: what computes its products.
      shape: the sizes that the program is for.
    """
    times: dict[str, float] = collections.defaultdict(float)
    for kernel, ms in kernels:
        times[kernel] += ms
    total = sum(times.values())
    long = {kernel: ms for kernel, ms in times.items() if ms >= _MIN_SHARE * total}
    named = [
        (f"{what}: all kernels", total),
        *sorted(long.items(), key=lambda item: -item[1]),
        ("shorter ones", total - sum(long.values())),
    ]
    for name, ms in named:
        yield Row(
            what=name,
            implementation=implementation,
            shape=shape,
            **Timing(ms, ms, "kernels")._asdict(),
            rate=100.0 * ms / total,
        )
