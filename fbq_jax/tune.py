"""Finds the fastest configurations of the GEMM kernels on this GPU.

Measures every candidate for each shape, with and without fallback, and writes the
fastest one to the table that the kernels read (fbq_jax.kernels.tuning_table).
Entries for other shapes are kept.  Training only reads the table.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from fbq_jax.bench import cli, gemm, measure, results
from fbq_jax.kernels import tuning_table
from fbq_jax.ops import dispatch

# (M, N, K): square GEMMs, and the GEMMs of a Llama block's MLP, where the number of
# tokens is M or, for the gradient of a weight, K.
SIZES = (
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (4096, 14336, 8192),
    (14336, 4096, 8192),
)
FALLBACK_RATE = 0.2
_MAX_ERROR = 5e-3  # relative; the output is rounded to bfloat16


def candidates(implementation: str) -> list[dict[str, int]]:
    """The configurations to measure, as options of the kernel's ``Config``."""
    if implementation == "mosaic":
        return [{"group": group} for group in (4, 8, 16, 32)]
    names = ("BM", "BN", "halves", "num_warps", "num_stages", "group")
    values = [
        (128, 128, 2, 4, 3, 8),
        (128, 128, 2, 4, 3, 16),
        (64, 128, 1, 4, 3, 16),
        (64, 128, 1, 4, 4, 16),
        (128, 128, 1, 8, 3, 8),
        (128, 128, 1, 8, 4, 8),
        (128, 64, 1, 8, 4, 8),
    ]
    return [dict(zip(names, value, strict=True)) for value in values]


def tune(
    implementation: str,
    sizes: tuple[int, int, int],
    *,
    fallback: bool,
    effort: measure.Effort,
) -> tuple[dict[str, int], float]:
    """The fastest candidate for ``(M, N, K)``, and its time in milliseconds."""
    rate = FALLBACK_RATE if fallback else 0.0
    operands = gemm.operands(sizes, rate, implementation)
    expected = gemm.jitted_matmul(jnp.float32, "reference")(*operands)
    times = {}
    for options in candidates(implementation):
        matmul = jax.jit(_matmul(implementation, options))
        error = measure.relative_error(matmul(*operands), expected)
        measure.require(error, _MAX_ERROR, f"{implementation} with {options}")
        timing = measure.timing(matmul, *operands, effort=effort)
        times[tuple(options.items())] = timing.ms
    best = min(times, key=times.__getitem__)
    return dict(best), times[best]


def _matmul(implementation: str, options: dict[str, int]) -> Callable[..., jax.Array]:
    module = importlib.import_module(f"fbq_jax.kernels.{implementation}.gemm")
    config = module.Config(**options)
    return functools.partial(module.matmul, dtype=jnp.bfloat16, config=config)


_Entries = dict[str, dict[str, dict[str, int]]]


def _read(file: Path) -> _Entries:
    """Reads the entries of a table; there are none if the file does not exist.

    Raises:
      ValueError: if the file is not a table.
    """
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_bytes())["entries"]
        return {op: dict(of_op) for op, of_op in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a table of configurations") from error


def _write(file: Path, entries: _Entries) -> None:
    """Writes the entries of a table."""
    device = jax.devices()[0].device_kind
    file.parent.mkdir(parents=True, exist_ok=True)
    results.write(file, {"device": device, "entries": dict(sorted(entries.items()))})


def _available(implementations: Sequence[str]) -> Iterator[str]:
    """The implementations that run on this device; prints why others do not."""
    for implementation in implementations:
        try:
            dispatch.choose("matmul", gemm.BLOCK_SHAPE, implementation=implementation)
        except ValueError as error:
            print(f"left out: {error}")
        else:
            yield implementation


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fbq_jax.tune", description=__doc__)
    parser.add_argument(
        "--implementation", choices=("mosaic", "triton"), help="by default both"
    )
    parser.add_argument(
        "--sizes",
        type=functools.partial(cli.read_shape, "M,N,K"),
        nargs="+",
        default=SIZES,
        metavar="M,N,K",
    )
    parser.add_argument("--out", type=Path, help="by default the kernels' own table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    out = options.out or tuning_table.path(jax.devices()[0].device_kind)
    existing = next((path for path in out.absolute().parents if path.exists()), out)
    if out.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
        parser.error(f"cannot write {out}: name another file with --out")
    try:
        entries = _read(out)
    except ValueError as error:
        parser.error(str(error))
    names = [options.implementation] if options.implementation else ["mosaic", "triton"]
    implementations = list(_available(names))
    if not implementations:
        print("fbq_jax.tune: no kernel to tune runs here", file=sys.stderr)
        return 2
    for implementation, sizes, fallback in itertools.product(
        implementations, options.sizes, (False, True)
    ):
        best, ms = tune(implementation, sizes, fallback=fallback, effort=measure.QUICK)
        op = f"{implementation}.matmul" + (".fallback" if fallback else "")
        print(f"{op} {'x'.join(map(str, sizes))}: {best}, {ms:.3f} ms", flush=True)
        entries.setdefault(op, {})[tuning_table.bucket(sizes)] = best
        _write(out, entries)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
