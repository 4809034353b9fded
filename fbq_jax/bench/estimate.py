"""Estimates the time of a linear layer on a GPU that was not measured.

A multiprocessor's cycles follow from the instructions of the compiled GEMM and from the
published rates. Two bounds enclose the time:

- In the *best case* all work overlaps. A step takes as long as the busiest of tensor
  cores, instruction issue, float32 units and shared memory. Quantization moves its
  bytes at the full bandwidth of the memory.
- In the *worst case* the tensor cores wait while other instructions are issued.
  Quantization reaches half of the bandwidth.

Neither knows of latencies, of the L2 cache or of a power limit. bf16 is taken at its
published peak, which it does not reach either.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fbq_jax.bench.cards import PARTITIONS, SHARED_PER_CYCLE, Card
from fbq_jax.bench.sass import Loop

FALLBACK_RATE = 0.2
_WORST_BANDWIDTH = 0.5  # of the memory's


class Range(NamedTuple):
    """The best and the worst case."""

    best: float
    worst: float


class CompiledProduct(NamedTuple):
    """A compiled GEMM of a layer.

    Attributes:
      what: ``"Y"``, ``"dX"`` or ``"dW"``.
      sizes: ``(M, N, K)``.
      tile: the sizes of one step of one program.
      programs: the programs that share a multiprocessor.
      num_warps: warps of a program.
      loop: what a warp executes in a step.
      extra_steps: the share of steps that fallback adds.
    """

    what: str
    sizes: tuple[int, int, int]
    tile: tuple[int, int, int]
    programs: int
    num_warps: int
    loop: Loop
    extra_steps: float


class Cycles(NamedTuple):
    """Cycles of a multiprocessor while each of its programs does one step.

    Attributes:
      tensor: that the tensor cores multiply.
      issue: that the schedulers issue instructions.
      float32: that the float32 units and the conversions are busy.
      shared: that shared memory is busy.
      step: that the step takes.
    """

    tensor: float
    issue: float
    float32: float
    shared: float
    step: Range


class LayerTime(NamedTuple):
    """Milliseconds of a layer's forward and backward pass.

    Attributes:
      bf16: its three products at the peak rate.
      products: its three products in INT8.
      quantization: of X, W and dY.
    """

    bf16: float
    products: Range
    quantization: Range

    @property
    def speedup(self) -> Range:
        """How many times as fast as bf16 the layer is."""
        totals = map(sum, zip(self.products, self.quantization, strict=True))
        return Range(*(self.bf16 / total for total in totals))


def layer_time(
    shape: tuple[int, int, int], products: Sequence[CompiledProduct], card: Card
) -> LayerTime:
    """Estimates a layer ``(M, K, N)``."""
    M, K, N = shape
    times = [_product_ms(product, card) for product in products]
    # Each operand is read in bf16, and its codes are written in both layouts. Blocks of
    # X that fall back also have residual codes.
    moved = 4.0 * (M * K + K * N + M * N) + FALLBACK_RATE * M * K
    quantization = moved / card.bandwidth / 1e9
    return LayerTime(
        bf16=6.0 * M * K * N / card.bf16 / 1e9,
        products=Range(*map(sum, zip(*times, strict=True))),
        quantization=Range(quantization, quantization / _WORST_BANDWIDTH),
    )


def step_cycles(product: CompiledProduct, card: Card) -> Cycles:
    """The cycles of a step on a card."""
    loop, architecture = product.loop, card.architecture
    warps = product.programs * product.num_warps
    tensor = warps * loop.macs / card.int8_macs
    issue = warps / PARTITIONS * loop.instructions
    float32 = loop.float32 / architecture.float32
    float32 += loop.conversions / architecture.conversions
    float32 *= 32 * warps
    shared = warps * loop.shared_bytes / SHARED_PER_CYCLE
    best = max(tensor, issue, float32, shared)
    other_issue = issue * (1 - loop.tensor / loop.instructions)
    worst = max(best, tensor + other_issue)
    return Cycles(tensor, issue, float32, shared, Range(best, worst))


def _product_ms(product: CompiledProduct, card: Card) -> Range:
    M, N, K = product.sizes
    rows, columns, depth = product.tile
    tiles = math.ceil(M / rows) * math.ceil(N / columns)
    waves = math.ceil(tiles / (card.multiprocessors * product.programs))
    steps = math.ceil(K / depth) * (1.0 + product.extra_steps)
    cycles = step_cycles(product, card).step
    return Range(*(waves * steps * of_step / card.clock / 1e6 for of_step in cycles))
