"""What the benchmarks' tests share."""

import dataclasses

import pytest

from fbq_jax import FLOAT_GEMM, Gemm
from fbq_jax.bench import measure, results
from fbq_jax.bench.measure import Timing

EFFORT = measure.Effort(warm_up_s=0.0, samples=2, batch_s=0.0, rest_s=0.0, launches=2)
OPTIONS = {"implementation": "reference", "effort": EFFORT}


def float_backward(recipe):
    """A recipe whose backward GEMMs are in float, which halves the compile time."""
    drhs = Gemm(lhs=None, rhs=None, keeps="codes")
    return dataclasses.replace(recipe, dlhs=FLOAT_GEMM, drhs=drhs)


def check_rates(rows, work):
    """Times are positive, and rates follow from them and from the work of a row."""
    for row in rows:
        assert row.ms > 0.0
        assert row.burst_ms > 0.0
        assert row.burst_of == "calls"
        assert row.rate == pytest.approx(work(row) / row.ms / 1e9)


def some_rows(what="INT8"):
    """A baseline, and a row that is twice as fast."""
    bf16 = results.row(
        Timing(2.0, 1.0, "kernels"), 4e9, what="bf16", implementation="xla", shape=(1,)
    )
    row = results.row(
        Timing(1.0, 0.8, "kernels"),
        4e9,
        what=what,
        implementation="mosaic",
        shape=(1, 2, 3),
        fallback=0.2,
        errors={"y": 1e-3},
    )
    return list(results.with_ratios([bf16, row]))
