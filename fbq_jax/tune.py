"""Finds the fastest configurations of the GEMM kernels on this GPU.

    python -m fbq_jax.tune [--implementation NAME] [--sizes M,N,K ...] [--out FILE]

Measures every candidate for each shape, with and without fallback, and writes the
fastest into the table that the kernels read (``fbq_jax.kernels.tuning_table``).
Entries of other shapes stay.  Nothing is tuned while a model trains.
"""

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.bench import measure
from fbq_jax.kernels import tuning_table
from fbq_jax.kernels.reference import Quantized
from fbq_jax.ops import dispatch

# (M, N, K) of squares, and of the GEMMs of a Llama block's MLP: two have the tokens as
# M, that of a weight's gradient has them as K.
SIZES = (
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (4096, 14336, 8192),
    (14336, 4096, 8192),
)
RATE = 0.2
_BLOCKS = (128, 128, 128)
_LIMIT = 5e-3  # rounding to bf16


def candidates(implementation: str) -> list[dict[str, int]]:
    """The configurations that are worth measuring."""
    if implementation == "mosaic":
        return [
            {"group": group, "cluster": cluster}
            for group, cluster in ((4, 2), (8, 2), (16, 2), (8, 1))
        ]
    names = ("BM", "BN", "halves", "num_warps", "num_stages", "group")
    values = [
        (128, 128, 2, 4, 3, 8),
        (128, 128, 2, 4, 3, 16),
        (64, 128, 1, 4, 4, 16),
        (128, 128, 1, 8, 3, 8),
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
    operands = _operands(sizes, fallback=fallback)
    definition = functools.partial(ops.matmul, block_shape=_BLOCKS, dtype=jnp.float32)
    wanted = jax.jit(functools.partial(definition, implementation="reference"))(
        *operands
    )
    times = {}
    for options in candidates(implementation):
        matmul = jax.jit(_matmul(implementation, options))
        error = measure.relative_error(matmul(*operands), wanted)
        measure.require(error, _LIMIT, f"{implementation} with {options}")
        timing = measure.timing(matmul, *operands, effort=effort)
        times[tuple(options.items())] = timing.ms
    best = min(times, key=times.__getitem__)
    return dict(best), times[best]


def _matmul(implementation: str, options: dict[str, int]) -> Callable[..., jax.Array]:
    module: Any
    if implementation == "mosaic":
        from fbq_jax.kernels.mosaic import gemm as module
    else:
        from fbq_jax.kernels.triton import gemm as module
    config = module.Config(**options)
    return functools.partial(
        module.matmul, block_shape=_BLOCKS, dtype=jnp.bfloat16, config=config
    )


def _operands(
    sizes: tuple[int, int, int], *, fallback: bool
) -> tuple[Quantized, Quantized | None, Quantized]:
    """Codes of Gaussian data, and of a residual that is used at random."""
    M, N, K = sizes
    keys = jax.random.split(jax.random.key(0), 4)

    def quantized(key: jax.Array, rows: int) -> Quantized:
        codes = 30 * jax.random.normal(key, (1, rows, K))
        codes = jnp.clip(jnp.round(codes), -127, 127).astype(jnp.int8)
        return Quantized(codes, jnp.full((1, -(-rows // 128), -(-K // 128)), 1e-2))

    residual = quantized(keys[1], M)
    used = jax.random.uniform(keys[3], residual.scales.shape) < RATE
    residual = residual._replace(scales=jnp.where(used, residual.scales, 0.0))
    return quantized(keys[0], M), residual if fallback else None, quantized(keys[2], N)


_Entries = dict[str, dict[str, dict[str, int]]]


def _read(file: Path) -> _Entries:
    """The entries of a table's file, none if there is no file.

    Raises:
      ValueError: if it is not a table.
    """
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text())["entries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a table of configurations") from error
    return entries


def _write(file: Path, old: _Entries, new: _Entries) -> None:
    """Writes old entries and new ones, all or nothing."""
    merged = {op: {**old.get(op, {}), **new.get(op, {})} for op in sorted({*old, *new})}
    content = {"device": jax.devices()[0].device_kind, "entries": merged}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError
    return sizes


_sizes.__name__ = "M,N,K"  # what argparse calls it in an error


def _that_run(implementations: Sequence[str]) -> Iterator[str]:
    for implementation in implementations:
        try:
            dispatch.choose("matmul", _BLOCKS, implementation=implementation)
        except ValueError as refusal:
            print(f"left out: {refusal}")
        else:
            yield implementation


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fbq_jax.tune", description=__doc__)
    parser.add_argument(
        "--implementation", choices=("mosaic", "triton"), help="by default both"
    )
    parser.add_argument("--sizes", type=_sizes, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, help="by default the kernels' own table")
    options = parser.parse_args(arguments)
    out = options.out or tuning_table.path(jax.devices()[0].device_kind)
    if not os.access(out.parent if out.parent.exists() else out.parent.parent, os.W_OK):
        parser.error(f"cannot write {out}: name another file with --out")
    try:
        old = _read(out)
    except ValueError as error:
        parser.error(str(error))
    asked = [options.implementation] if options.implementation else ["mosaic", "triton"]
    implementations = list(_that_run(asked))
    if not implementations:
        print("fbq_jax.tune: no kernel to tune runs here", file=sys.stderr)
        return 2
    new: _Entries = {}
    for implementation, sizes, fallback in itertools.product(
        implementations, options.sizes, (False, True)
    ):
        best, ms = tune(implementation, sizes, fallback=fallback, effort=measure.QUICK)
        op = f"{implementation}.matmul" + (".fallback" if fallback else "")
        print(f"{op} {'x'.join(map(str, sizes))}: {best}, {ms:.3f} ms", flush=True)
        new.setdefault(op, {})[tuning_table.bucket(sizes)] = best
        _write(out, old, new)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
