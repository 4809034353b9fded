"""The products of experts, each with its own rows, against bf16 and other libraries."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fbq_jax.bench import grouped_programs as programs
from fbq_jax.bench import layers, measure
from fbq_jax.bench.grouped_programs import (
    BLOCK_SHAPE,
    LAYER,
    LAYER_LOADS,
    LOADS,
    PRODUCTS,
    Codes,
    Operands,
    Program,
)
from fbq_jax.bench.measure import Effort, Timing
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.kernels.grouped_reference import from_tiles
from fbq_jax.ops import dispatch

# Of torchao's table, of Mixtral 8x7B, of Qwen3-30B-A3B, and of DeepSeek-V3 with 32 of
# its experts on a device.
SHAPES = (
    (32768, 7168, 2048, 8),
    (16384, 4096, 14336, 8),
    (32768, 2048, 768, 128),
    (32768, 7168, 2048, 32),
)
# bf16 outputs of the same codes, and INT8 against float32.
_GEMM_LIMIT, _INT8_LIMIT = 3e-3, 0.1


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures the products of each ``(M, K, N, E)``, bf16 in and out.

    First come the three GEMMs of codes, then all three with quantization.  The rows are
    shared out among the experts evenly, by Zipf's law, or all to one expert.  The
    baseline is a dense product ``[M, K] x [K, N]`` of as many operations, in bf16.

    Work counts ``2 M K N`` operations a product, and nothing that a recipe adds.

    Raises:
      WrongResultError: if columns at both ends of a product differ from float32's.
    """
    effort = effort._replace(  # The section has many rows.
        warm_up_s=effort.warm_up_s / 2,
        samples=-(-effort.samples // 2),
        rest_s=effort.rest_s / 4,
    )
    choice = dispatch.choose(
        "ragged_matmul", BLOCK_SHAPE, implementation=implementation
    )
    for shape in shapes:
        yield from _rows(shape, choice, effort)


def loads(M: int, E: int) -> dict[str, np.ndarray]:
    """The number of rows of each expert, by the name of the load."""
    shares = 1.0 / np.random.default_rng(0).permutation(np.arange(1, E + 1))
    found = []
    for share in (np.ones(E), shares, np.arange(E) == E // 2):
        sizes = np.floor(M * share / share.sum()).astype(np.int32)
        sizes[np.argmax(sizes)] += M - sizes.sum()
        found.append(sizes)
    return dict(zip(LOADS, found, strict=True))


def _rows(
    shape: tuple[int, ...], choice: dispatch.Choice, effort: Effort
) -> Iterator[Row]:
    M, _, _, E = shape
    operands = programs.make_operands(shape, loads(M, E))
    codes = {
        name: programs.quantized(of_load, choice.implementation)
        for name, of_load in operands.items()
    }
    to_measure = programs.make_programs(operands, choice)

    def compiled(program: Program) -> Any:
        load = program.loads[0] if program.loads else LOADS[0]
        args = program.args(operands[load], codes[load])
        return jax.jit(program.function).lower(*args).compile()

    alone = [program for program in to_measure if program.compiles_alone]
    rest = [program for program in to_measure if not program.compiles_alone]
    functions = dict(zip(alone, map(compiled, alone), strict=True))
    together = [functools.partial(compiled, program) for program in rest]
    functions |= zip(rest, layers.compile_together(together), strict=True)
    runs = [
        _Run(program, functions[program], shape, operands, codes)
        for program in to_measure
    ]
    errors = [run.checked_errors() for run in runs]
    for product in (*PRODUCTS, LAYER):
        dense, *others = (
            pair
            for pair in zip(runs, errors, strict=True)
            if pair[0].program.product == product
        )
        timing = dense[0].timing(LOADS[0], effort)
        for load in LOADS if product != LAYER else LAYER_LOADS:
            yield from with_ratios(
                _load_rows(load, dense[0].row(load, timing, {}), others, effort)
            )


class _Run(NamedTuple):
    """A compiled program with all that it is measured with."""

    program: Program
    function: Callable[..., Any]
    shape: tuple[int, ...]
    operands: dict[str, Operands]
    codes: dict[str, Codes]

    def args(self, load: str) -> tuple[Any, ...]:
        return self.program.args(self.operands[load], self.codes[load])

    def checked_errors(self) -> dict[str, dict[str, float]]:
        """The errors of each load."""
        return {load: self._checked_errors(load) for load in self.program.loads}

    def _checked_errors(self, load: str) -> dict[str, float]:
        names = PRODUCTS if self.program.product == LAYER else (self.program.product,)
        results = self.function(*self.args(load))
        actual = results if self.program.product == LAYER else (results,)
        operands, codes = self.operands[load], self.codes[load]
        if self.program.is_codes and self.program.product != "dW":
            actual = (from_tiles(results, codes.tiles),)
        if self.program.is_codes:
            codes = codes if self.program.fallback else programs.without_residual(codes)
            exact = programs.dequantized_ends(codes)
        else:
            exact = programs.exact_ends(operands)
        what = f"{self.program.what} of {self.shape}, {load}, by {self.program.backend}"
        limit = _GEMM_LIMIT if self.program.is_codes else _INT8_LIMIT
        return measure.checked_errors(
            dict.fromkeys([name.lower() for name in names], limit),
            [
                programs.ends_of(name, result)
                for name, result in zip(names, actual, strict=True)
            ],
            [exact[PRODUCTS.index(name)] for name in names],
            what,
        )

    def timing(self, load: str, effort: Effort) -> Timing:
        return measure.timing(self.function, *self.args(load), effort=effort)

    def row(self, load: str, timing: Timing, errors: dict[str, float]) -> Row:
        M, K, N, _ = self.shape
        products = 3.0 if self.program.product == LAYER else 1.0
        return row(
            timing,
            products * 2.0 * M * K * N,
            what=self.program.what,
            layer=self.program.product,
            data=load,
            implementation=self.program.backend,
            shape=self.shape,
            fallback=self.program.fallback,
            errors=errors,
        )


def _load_rows(
    load: str,
    dense: Row,
    others: Sequence[tuple[_Run, dict[str, dict[str, float]]]],
    effort: Effort,
) -> Iterator[Row]:
    yield dense
    for run, errors in others:
        if load in run.program.loads:
            yield run.row(load, run.timing(load, effort), errors[load])
