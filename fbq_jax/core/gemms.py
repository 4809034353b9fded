"""What runs the INT8 GEMMs of a layer: ``Gemms``, and that of a dense layer.

``fbq_jax.core.grouped_gemms`` has those of groups of rows.
"""

import abc
import dataclasses
import math
from typing import TypeVar

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.core.noise import SUM_STREAM, seeds_of
from fbq_jax.core.rows import Matrices, MatrixStack, Rows
from fbq_jax.core.spec import GemmSpec, Spec
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.rounding import CallSeed, fold_seeds

Tree = TypeVar("Tree")


class Gemms(abc.ABC):
    """Runs the INT8 GEMMs of a layer.

    The shapes here are a dense layer's.  Where rows are in groups, each subclass
    documents its own.
    """

    @abc.abstractmethod
    def tile_rows(self, x: jax.Array) -> Rows:
        """X or dY in the form that the ops quantize."""

    @abc.abstractmethod
    def stack(self, x: jax.Array) -> MatrixStack:
        """X or dY as matrices that a fused op quantizes.

        ``x`` is as a GEMM reads or returns it, in tiles if rows are in groups.
        """

    def unstack(self, tree: Tree) -> Tree:
        """Arrays ``[B, ...]`` that an op made of ``stack``, as GEMMs read them."""
        return tree

    @abc.abstractmethod
    def count_blocks(self, spec: Spec, x: jax.Array) -> jax.Array | None:
        """The number of blocks of X, as in ``threshold.apply``."""

    @abc.abstractmethod
    def multiply(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies lhs and its residual with rhs, for Y.

        Args:
          spec: the settings of the GEMM; M, K and N are its own.
          lhs: the rowwise codes ``[B, M, K]`` or ``[B, G, R, K]``, with their scales.
          residual: a second term of lhs, of the same shapes, or None.
          rhs: the codes ``[B, N, K]`` and their scales.
          seed: seeds the noise of a sum over devices in INT8.

        Returns:
          ``[B, M, N]`` or ``[B, G, R, N]`` in ``spec.dtype``.
        """

    @abc.abstractmethod
    def multiply_grad(
        self, spec: GemmSpec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """``multiply`` for dX, of the codes of dY."""

    @abc.abstractmethod
    def contract_rows(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies X' with dY, for dW.

        Args:
          spec: the settings of the GEMM.
          lhs: the colwise codes of X, ``[B, K, M]``, ``[B, K, G, R]`` or, in P shards,
            ``[B, P, K, M / P]``, with their scales.
          rhs: the colwise codes of dY, with N in place of K, and their scales.
          seed: seeds the noise of a sum over devices in INT8.

        Returns:
          ``[B, K, N]`` in ``spec.dtype``.
        """


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DenseGemms(Gemms):
    """Runs the INT8 GEMMs of a dense layer, on stacks of matrices."""

    def tile_rows(self, x: jax.Array) -> Rows:
        """The matrices ``[B, M, K]`` or ``[B, G, R, K]``."""
        return Matrices(x)

    def stack(self, x: jax.Array) -> MatrixStack:
        """The same matrices."""
        return MatrixStack(x, jnp.arange(x.shape[0], dtype=jnp.int32))

    def count_blocks(self, spec: Spec, x: jax.Array) -> jax.Array | None:
        """None, which stands for all of them."""
        del spec, x
        return None

    def multiply(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Y, ``[B, M, N]`` or ``[B, G, R, N]``."""
        gemm = spec.gemm
        first = 2 if gemm.shards == 1 else 3
        contraction = math.prod(rhs.codes.shape[first:]) or 1
        block_shape, seeds = spec.block_shape, None
        if not gemm.splits_contraction:
            block_shape = (1, contraction, 1)
        if gemm.reduce == "int8":
            index = jnp.arange(lhs.codes.shape[0], dtype=jnp.int32)
            seeds = fold_seeds(seeds_of(seed, SUM_STREAM, index))
        return ops.matmul(
            lhs,
            residual,
            rhs,
            block_shape=block_shape,
            dtype=spec.dtype,
            reduce=gemm.reduce,
            seeds=seeds,
            implementation=spec.implementation,
        )

    def multiply_grad(
        self, spec: GemmSpec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """dX, ``[B, M, K]`` or ``[B, G, R, K]``."""
        return self.multiply(spec, grad, None, rhs, seed)

    def contract_rows(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """dW, ``[B, K, N]``."""
        return self.multiply(spec, lhs, None, rhs, seed)


DENSE = DenseGemms()
