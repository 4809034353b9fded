"""What a second term, or finer scales, would win in INT8 and in FP8.

    python -m experiments.second_terms --out FILE

Products are computed with operands that are rounded as a scheme says. Blocks that get a
second term are the worst ones of each product, so a threshold that moves from step to
step would do no better. The command writes errors; ``experiments.checkpoint`` has the
losses of a model.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments import result_files

_K = 128  # values along the contraction that share a scale
OUTLIERS = 0, 58, 606, 6559  # the largest magnitude over the root mean square


@dataclasses.dataclass(frozen=True)
class Operand:
    """How an operand is rounded.

    Attributes:
        bits: Of the integer codes; None for FP8, E4M3.
        rows: The tokens, or the output channels, that share a scale with 128 values
            along the contraction.
        rate: The share of blocks that get a second term, which is the rounded residual
            with a scale of its own.
        metric: Which blocks are the worst: by their largest magnitude ("absmax"), the
            square error ("error"), or that over their squares ("relative").
        by_row: Whether each row has a scale of its own besides.
    """

    bits: int | jax.Array | None
    rows: int
    rate: float | jax.Array = 0.0
    metric: str = "error"
    by_row: bool = False


Scheme = tuple[Operand | None, Operand | None]


def schemes() -> dict[str, Scheme]:
    """The schemes for X and W by name; None is not rounded."""
    found: dict[str, Scheme] = {}
    for bits, name in ((8, "INT8"), (None, "FP8")):
        block, row = Operand(bits, 128), Operand(bits, 1)
        with_term = functools.partial(dataclasses.replace, rate=0.2)
        found |= {
            f"{name}: blocks": (block, block),
            f"{name}: row blocks of X": (row, block),
            f"{name}: row blocks of X and W": (row, row),
            f"{name}: only X, row blocks": (row, None),
            f"{name}: only W, blocks": (None, block),
            f"{name}: only W, row blocks": (None, row),
        }
        for side in (8, 32, 64):
            of_w = f"blocks of {side}x{_K} of W"
            found[f"{name}: row blocks of X, {of_w}"] = row, Operand(bits, side)
        rows = Operand(bits, 128, by_row=True)
        found[f"{name}: row blocks of X, blocks and rows of W"] = row, rows
        for rate in (0.1, 0.2, 0.3):
            term = f"second term for {rate:.0%}"
            found[f"{name}: blocks, {term}"] = with_term(block, rate=rate), block
            found[f"{name}: row blocks of X, {term}"] = with_term(row, rate=rate), block
        for metric in ("absmax", "relative"):
            term = f"second term for 20% by {metric}"
            found[f"{name}: blocks, {term}"] = with_term(block, metric=metric), block
        for rate in (0.1, 0.2):
            term = f"second term for {rate:.0%} of W"
            found[f"{name}: row blocks of X, {term}"] = row, with_term(block, rate=rate)
        term = "second terms for 20% of X and W"
        found[f"{name}: row blocks of X, {term}"] = with_term(row), with_term(block)
        term = "second term for 20% of X"
        found[f"{name}: row blocks of X and W, {term}"] = with_term(row), row
    return found


def rounded(x: jax.Array, how: Operand | None) -> jax.Array:
    """The values of the codes of ``x`` [rows, K], in float32."""
    x = x.astype(jnp.float32)
    if how is None:
        return x
    if how.by_row:
        largest = jnp.abs(x).max(axis=1, keepdims=True)
        scale = jnp.where(largest == 0, 1.0, largest)
        return rounded(x / scale, dataclasses.replace(how, by_row=False)) * scale
    (rows, columns), sides = x.shape, (how.rows, _K)
    x = jnp.pad(
        x, [(0, -size % side) for size, side in zip(x.shape, sides, strict=True)]
    )
    blocks = x.reshape(-1, how.rows, x.shape[1] // _K, _K).swapaxes(1, 2)
    values = _round(blocks, how.bits)
    error, squares = jnp.square(blocks - values), jnp.square(blocks)
    metric = {
        "absmax": jnp.abs(blocks).max(axis=(2, 3)),
        "error": error.sum(axis=(2, 3)),
        "relative": error.sum(axis=(2, 3)) / (squares.sum(axis=(2, 3)) + 1e-30),
    }[how.metric]
    falls_back = metric > jnp.quantile(metric, 1 - how.rate)
    residual = _round(blocks - values, how.bits)
    values += jnp.where(falls_back[:, :, None, None], residual, 0.0)
    return values.swapaxes(1, 2).reshape(x.shape)[:rows, :columns]


def _round(blocks: jax.Array, bits: int | jax.Array | None) -> jax.Array:
    amax = jnp.abs(blocks).max(axis=(2, 3), keepdims=True)
    largest = 448.0 if bits is None else jnp.ldexp(1.0, bits - 1) - 1
    scale = jnp.where(amax == 0, 1.0, amax / largest)
    y = blocks / scale
    if bits is not None:
        return jnp.round(y) * scale
    # XLA would drop a cast to fewer bits and back.
    return lax.optimization_barrier(y.astype("float8_e4m3fn")).astype(y.dtype) * scale


def multiply(scheme: Scheme, x: jax.Array, w: jax.Array) -> jax.Array:
    """``X . W`` of ``[M, K]`` and ``[K, N]``, rounded by a scheme."""
    return rounded(x, scheme[0]) @ rounded(w.T, scheme[1]).T


def errors(scheme: Scheme) -> dict[str, float]:
    """The relative error of Y, by the outliers of X.

    Outliers are in two channels that few tokens have. The rows of W that they meet are
    divided by the factor of X, so Y stays the same.
    """
    keys, found = jax.random.split(jax.random.key(0)), {}
    channels, tokens = jnp.array([5, 700]), 512
    x, w = (
        jax.random.normal(keys[0], (tokens, 1024)),
        jax.random.normal(keys[1], (1024, 512)),
    )
    x = x.at[:, channels].multiply(jnp.zeros((tokens, 1)).at[::64].set(1.0))
    exact = x @ w
    for size in OUTLIERS:
        factor = max(size / 3, 1)
        y = multiply(
            scheme,
            x.at[:, channels].multiply(factor),
            w.at[channels].divide(factor),
        )
        error = jnp.linalg.norm(y - exact)
        found[str(size)] = float(error / jnp.linalg.norm(exact))
    return found


def dot_general(
    scheme: Scheme, lhs: jax.Array, rhs: jax.Array, *_: Any, **__: Any
) -> Any:
    """A `lax.dot_general` for `Llama`, which only multiplies [..., K] by [K, N]."""
    y = multiply(scheme, lhs.reshape(-1, lhs.shape[-1]), rhs)
    return y.reshape(*lhs.shape[:-1], -1).astype(lhs.dtype)


def main(argv: list[str] | None = None) -> None:
    """Writes the errors of all schemes."""
    parser = argparse.ArgumentParser(prog="experiments.second_terms")
    parser.add_argument("--out", type=Path, required=True)
    rows = (
        {"what": name, "errors": errors(scheme)} for name, scheme in schemes().items()
    )
    result_files.save_rows(rows, parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
