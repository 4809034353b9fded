"""The three GEMMs of a linear layer, as a ``jax.custom_vjp``.

    Y = X . W        dX = dY . W'        dW = X' . dY

The recipe decides whether each GEMM multiplies codes or runs unquantized.  INT8 tensor
cores read both operands contiguously along the contraction, so a matrix that two GEMMs
read is quantized in two layouts: X rowwise for Y and colwise for dW, W colwise for Y
and rowwise for dX, dY rowwise for dX and colwise for dW.

The forward pass saves X and W in the form that the backward GEMMs read: codes and
scales, or the operand itself for an unquantized GEMM.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core import threshold
from fbq_jax.core.threshold import (
    GRAD_STREAM,
    LHS_STREAM,
    RHS_STREAM,
    SUM_STREAM,
    Scalars,
    Stats,
    frozen_seed,
    seeds_of,
)
from fbq_jax.kernels.quantized import (
    Block,
    Layout,
    Layouts,
    Quantized,
    Term,
    Unquantized,
)
from fbq_jax.kernels.rounding import CallSeed, Seeds, fold_seeds
from fbq_jax.kernels.sources import Matrix, Source
from fbq_jax.ops.products import quantizes_lhs, reads_sums
from fbq_jax.recipes.schema import Gemm, Quantizer, Recipe, Scales
from fbq_jax.sharding.mesh_axes import warn_of_copies

Tree = TypeVar("Tree")

# checkpoint_names of the codes that the forward pass saves for the backward pass, and
# of the seed of dY's noise.  The seed of a layer with state is ready after its forward
# quantization, which a backward pass that recomputes the seed would have to repeat.
LHS_NAME = "fbq_lhs"
RHS_NAME = "fbq_rhs"
SEED_NAME = "fbq_seed"

_BLOCK = 128


class Plan(NamedTuple):
    """How a matrix is quantized for the GEMMs that read it.

    Attributes:
      rowwise: the layout of the matrix itself, or None.
      colwise: the layout of its transpose, or None.
      shards: the shards that rows are split into for the colwise layout.
    """

    rowwise: Layout | None
    colwise: Layout | None
    shards: int = 1


class Spec(NamedTuple):
    """The static settings of a layer's three GEMMs.

    Attributes:
      recipe: how the three GEMMs are quantized.
      dtype: the dtype of Y.
      lhs_dtype: the dtype of X and dX.
      rhs_dtype: the dtype of W and dW.
      implementation: the ops' implementation; None lets the dispatcher choose.
    """

    recipe: Recipe
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any
    implementation: str | None

    def lhs(self, *, save: bool) -> Plan:
        """X ``[M, K]``: rowwise for Y and, if the backward pass needs it, for dW."""
        recipe = self.recipe
        backward = recipe.drhs.quantizers[0] if save else None
        return _plan(recipe.lhs_block, recipe.fwd.quantizers[0], backward)

    def rhs(self, *, save: bool) -> Plan:
        """W ``[K, N]``: colwise for Y and, if the backward pass needs it, for dX."""
        recipe = self.recipe
        backward = recipe.dlhs.quantizers[1] if save else None
        plan = _plan(recipe.rhs_block, backward, recipe.fwd.quantizers[1])
        return self._with_sums(plan)

    def grad(self, *, frozen: bool) -> Plan:
        """The gradient of Y ``[M, N]``: rowwise for dX and, unless frozen, colwise."""
        recipe = self.recipe
        colwise = None if frozen else recipe.drhs.quantizers[1]
        plan = _plan(recipe.grad_block, recipe.dlhs.quantizers[0], colwise)
        return self._with_sums(plan, rowwise=False)

    def _with_sums(self, plan: Plan, *, rowwise: bool = True) -> Plan:
        """Adds sums to the layouts that are the second operand of a GEMM."""
        recipe, dtypes = self.recipe, (self.dtype, self.lhs_dtype, self.rhs_dtype)
        block = recipe.block_shape
        if not reads_sums(block, dtypes, recipe.codes, self.implementation):
            return plan

        def add(layout: Layout | None) -> Layout | None:
            if layout is None or not layout.is_split or 1 in layout.block:
                return layout
            return layout._replace(sums=True)

        main = add(plan.rowwise) if rowwise else plan.rowwise
        return plan._replace(rowwise=main, colwise=add(plan.colwise))


def _plan(
    block: tuple[int, int], rowwise: Quantizer | None, colwise: Quantizer | None
) -> Plan:
    """The layouts that have a quantizer, of a matrix with these blocks."""
    r, c = block
    of_rows: dict[Scales, Block] = {"block": (r, c), "row_block": (1, c)}
    of_columns: dict[Scales, Block] = {"block": (r, c), "row_block": (r, 1)}
    of_rows |= {"row": (1, None), "tensor": (None, None)}
    of_columns |= {"row": (None, 1), "tensor": (None, None)}
    return Plan(
        rowwise and Layout(rowwise.rounding, of_rows[rowwise.scales]),
        colwise and Layout(colwise.rounding, of_columns[colwise.scales]),
        colwise.shards if colwise else 1,  # only drhs has several
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Rows:
    """How the rows of X, Y and their gradients lie: in matrices.

    X is ``[B, M, K]``; or ``[B, G, R, K]``, with M as two axes and R a multiple of the
    block's rows.  Layers of experts have rows in groups (``fbq_jax.experts``).
    """

    def matrix(self, x: jax.Array) -> tuple[Source, jax.Array]:
        """X or dY as ``quantize`` takes it, and the index of each matrix's noise."""
        return Matrix(x), jnp.arange(x.shape[0], dtype=jnp.int32)

    def stack(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """X or dY as a norm or gate in front of ``quantize`` takes it.

        Returns the values, the number of rows of each matrix, or None for all, and the
        index of each matrix's noise.
        """
        return x, None, jnp.arange(x.shape[0], dtype=jnp.int32)

    def unstack(self, tree: Tree) -> Tree:
        """What ``quantize`` made of a ``stack``, as GEMMs read it."""
        return tree

    def count_blocks(self, blocks: int) -> jax.Array | None:
        """The number of blocks of X, ``blocks`` in a row; None if all exist."""
        del blocks
        return None

    def quantize_lhs(
        self, spec: Spec, x: jax.Array, scalars: Scalars, *, save: bool, frozen: bool
    ) -> tuple[Layouts, Stats]:
        """The codes of X, and the stats; see ``quantize_activation``."""
        source, indices = self.matrix(x)
        plan = spec.lhs(save=save)
        return quantize_activation(
            spec, source, indices, scalars, plan, self, frozen=frozen
        )

    def quantize_grad(
        self, spec: Spec, dy: jax.Array, seed: CallSeed, *, frozen: bool
    ) -> Layouts:
        """The codes of dY; a frozen layer has no dW to read the colwise ones."""
        source, indices = self.matrix(dy)
        seeds = seeds_of(seed, GRAD_STREAM, indices)
        return quantize_in_layouts(spec, source, seeds, spec.grad(frozen=frozen))

    def multiply(
        self,
        spec: Spec,
        gemm: Gemm,
        lhs: Quantized,
        rhs: Quantized,
        seed: CallSeed,
        dtype: Any,
    ) -> jax.Array:
        """Multiplies ``lhs [B, M, K]`` with ``rhs [B, N, K]``."""
        seeds = None
        if gemm.reduce == "int8":
            index = jnp.arange(lhs.shape[0], dtype=jnp.int32)
            seeds = fold_seeds(seeds_of(seed, SUM_STREAM, index))
        return ops.matmul(
            lhs,
            rhs,
            dtype=dtype,
            reduce=gemm.reduce,
            seeds=seeds,
            ordered=gemm.ordered,
            implementation=spec.implementation,
        )

    def dlhs(
        self, spec: Spec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """dX, from the codes of dY and W."""
        gemm = spec.recipe.dlhs
        return self.multiply(spec, gemm, grad, rhs, seed, spec.lhs_dtype)

    def drhs(
        self, spec: Spec, lhs: Quantized, grad: Quantized, seed: CallSeed
    ) -> jax.Array:
        """DW ``[B, K, N]``, from the colwise codes of X and dY."""
        gemm = spec.recipe.drhs
        return self.multiply(spec, gemm, lhs, grad, seed, spec.rhs_dtype)

    def multiply_in_float(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
        """``X . W``, or ``dY . W'``, unquantized."""
        return float_matmul(x, w, dtype)

    def drhs_in_float(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
        """``X' . dY``, unquantized."""
        return float_matmul(x.mT, dy, dtype)


MATRICES = Rows()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | None,
    scalars: Scalars,
    codes: Layouts | None = None,
    rows: Rows = MATRICES,
) -> tuple[jax.Array, Stats]:
    """Multiplies X with W and measures the blocks of X.

    Args:
      spec: the static settings.
      x: the activation, in ``rows``.
      w: the weight, ``[B, K, N]``; None in a frozen layer, which has codes only.
      scalars: the threshold and the seeds of the call.
      codes: W as it was quantized before; None to quantize it here.
      rows: how the rows of X and Y lie.

    Returns:
      Y, such as ``[B, M, N]``, and the stats.  Their metric is float32
      ``[B, ceil(M/m), ceil(K/k)]``, or ``[B, 0, 0]`` without a criterion.
    """
    return matmul_fwd(spec, x, w, scalars, codes, rows, save=False)[0]


class SavedMatmul(NamedTuple):
    """The values that the forward pass saves for the backward pass.

    Attributes:
      lhs: the colwise codes of X for a dW of codes; otherwise X itself or its rowwise
        forward codes.  None in a frozen layer, which has no dW.  Codes are in words, as
        ``_in_words`` returns them.
      rhs: the rowwise codes of W for a dX of codes; otherwise W itself or its colwise
        forward codes.  Codes are in words, unless the layer was given them.
      seed: seeds the noise of dY.
      rows: how the rows lie.
    """

    lhs: Quantized | jax.Array | None
    rhs: Quantized | jax.Array
    seed: CallSeed
    rows: Rows


def matmul_fwd(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | None,
    scalars: Scalars,
    codes: Layouts | None,
    rows: Rows,
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, Stats], SavedMatmul | None]:
    """The results of ``matmul``, and what its backward pass reads if ``save``."""
    frozen = w is None
    if frozen and not save and rows == MATRICES:
        assert codes is not None
        if (y := _multiply_few_rows(spec, x, codes, scalars)) is not None:
            # Nothing reads the stats of a frozen layer: its state does not change.
            return (y, threshold.without_fallback(scalars, x.shape[0])), None
    lhs, stats = rows.quantize_lhs(
        spec, x, scalars, save=save and not frozen, frozen=frozen
    )
    seed = scalars.later_seed(stats)
    y, saved = forward(spec, lhs, w, codes, seed, rows, x=x, save=save)
    return (y, stats), saved


def quantize_activation(
    spec: Spec,
    source: Source,
    indices: jax.Array,
    scalars: Scalars,
    plan: Plan,
    rows: Rows,
    *,
    frozen: bool,
) -> tuple[Layouts, Stats]:
    """Quantizes X, selects the blocks that fall back, and moves the threshold.

    Args:
      spec: the static settings.
      source: X, or what it is computed from.
      indices: the index of each matrix, int32, which selects its noise.
      scalars: the threshold and the seeds of the call.
      plan: the layouts of X.
      rows: how its rows lie.
      frozen: whether the layer is frozen; its threshold, if it is unset, counts as 0.

    Returns:
      The codes, with the second term of the blocks that fall back, and the stats.
    """
    recipe = spec.recipe
    if recipe.criterion is None:
        stats = threshold.without_fallback(scalars, indices.size)
        seed = scalars.later_seed(stats)
    else:
        seed = scalars.call_seed
    layouts = quantize_in_layouts(
        spec,
        source,
        seeds_of(seed, LHS_STREAM, indices),
        plan,
        theta=jnp.broadcast_to(scalars.theta, indices.shape),
    )
    if recipe.criterion is None:
        return layouts, stats
    x = layouts.rowwise
    assert x is not None
    assert x.residual is not None
    assert layouts.metric is not None
    # The threshold takes the tiles of several problems as one stack.
    metric, residual = layouts.metric, x.residual
    stack = math.prod(metric.shape[:-2]), *metric.shape[-2:]
    in_stack = metric.ndim > 3 and source.row_counts is not None
    if in_stack:
        metric = metric.reshape(stack)
        residual = residual._replace(scales=residual.scales.reshape(stack))
    blocks = rows.count_blocks(metric.shape[-1])
    scales, stats = threshold.apply(
        scalars,
        metric,
        residual.scales,
        recipe,
        blocks=blocks,
        frozen=frozen,
        implementation=spec.implementation,
    )
    second = Term(residual.codes, scales.reshape(x.residual.scales.shape))
    return layouts._replace(rowwise=dataclasses.replace(x, residual=second)), stats


def quantize_in_layouts(
    spec: Spec,
    source: Source,
    seeds: Seeds,
    plan: Plan,
    theta: jax.Array | None = None,
) -> Layouts:
    """Quantizes in the layouts of a plan; with fallback if there are thresholds."""
    recipe, (rowwise, colwise, shards) = spec.recipe, plan
    if source.row_counts is not None:
        shards = 1  # a tile of a group has scales of its own already
    criterion = None if theta is None else recipe.criterion
    return ops.quantize(
        source,
        seeds,
        theta,
        rowwise=rowwise,
        colwise=colwise,
        criterion=criterion,
        bound=recipe.bound,
        dtype=recipe.codes,
        shards=shards,
        implementation=spec.implementation,
    )


def quantize_rhs(
    spec: Spec,
    w: jax.Array | None,
    codes: Layouts | None,
    seed: CallSeed,
    *,
    save: bool,
) -> Layouts:
    """W ``[B, K, N]`` in the layouts that the GEMMs read.

    Codes that the layer already has are taken as they are.  A frozen layer has colwise
    codes only.  Its rowwise codes are their transpose if both layouts share codes and
    scales; otherwise the dequantized weight is quantized again.  ``save`` says whether
    the backward pass needs the rowwise codes.
    """
    plan = spec.rhs(save=save)
    if codes is not None:
        rowwise, colwise = codes.rowwise, codes.colwise
        if rowwise is not None or plan.rowwise is None:
            return Layouts(rowwise, colwise)
        assert colwise is not None
        if _have_equal_codes(plan):
            transposed = colwise.mT
            main = transposed.main._replace(sums=None)
            return Layouts(dataclasses.replace(transposed, main=main), colwise)
        w, plan = colwise.dequantize(spec.rhs_dtype).mT, plan._replace(colwise=None)
    assert w is not None
    layouts = (plan.rowwise, plan.colwise)
    if not any(x and x.rounding == "stochastic" for x in layouts):
        seed = jnp.zeros((), jnp.uint32)  # not read, so codes depend on W only
    source, indices = MATRICES.matrix(w)
    seeds = seeds_of(seed, RHS_STREAM, indices)
    quantized = quantize_in_layouts(spec, source, seeds, plan)
    return quantized if codes is None else quantized._replace(colwise=codes.colwise)


def _have_equal_codes(plan: Plan) -> bool:
    """Whether both layouts have the same codes and scales, transposed."""
    rowwise, colwise = plan.rowwise, plan.colwise
    assert rowwise is not None
    assert colwise is not None
    same = rowwise.rounding == colwise.rounding and rowwise.block == colwise.block
    return same and rowwise.is_split


def _multiply_few_rows(
    spec: Spec, x: jax.Array, codes: Layouts, scalars: Scalars
) -> jax.Array | None:
    """Y of a frozen layer, if one op is to quantize X and to multiply; or None."""
    layout, w = spec.lhs(save=False).rowwise, codes.colwise
    assert layout is not None  # a frozen forward GEMM has codes
    assert w is not None
    if layout.rounding != "nearest" or not layout.is_split:
        return None
    theta = jnp.broadcast_to(scalars.theta, x.shape[:1])
    lhs = Unquantized(x, theta, layout.block, spec.recipe.criterion)
    count = math.prod(x.shape[1:-1])
    if not quantizes_lhs(count, lhs, w, spec.implementation):
        return None
    return ops.matmul(
        lhs,
        w,
        dtype=spec.dtype,
        reduce=spec.recipe.fwd.reduce,
        ordered=spec.recipe.fwd.ordered,
        implementation=spec.implementation,
    )


def forward(
    spec: Spec,
    lhs: Layouts,
    w: jax.Array | None,
    codes: Layouts | None,
    seed: CallSeed,
    rows: Rows = MATRICES,
    *,
    x: jax.Array | None = None,
    save: bool,
) -> tuple[jax.Array, SavedMatmul | None]:
    """Y, and what the backward pass reads if ``save``.

    Args:
      spec: the static settings.
      lhs: the codes of X.
      w: the weight, as in ``matmul``.
      codes: the codes of the weight, as in ``matmul``.
      seed: seeds stochastic rounding of W and dY.
      rows: how the rows of X and Y lie.
      x: the activation, as in ``matmul``; read by unquantized GEMMs only.
      save: whether there will be a backward pass.
    """
    recipe, rhs = spec.recipe, quantize_rhs(spec, w, codes, seed, save=save)
    if recipe.fwd.in_floats:
        assert x is not None
        assert w is not None  # a frozen forward GEMM has codes
        y = rows.multiply_in_float(x, w, spec.dtype)
    else:
        assert lhs.rowwise is not None
        assert rhs.colwise is not None
        y = rows.multiply(spec, recipe.fwd, lhs.rowwise, rhs.colwise, seed, spec.dtype)
    if not save:
        return y, None
    warn_of_copies()
    saved_lhs = None
    if w is not None:
        saved_lhs = _to_save(recipe.drhs, x, lhs.rowwise, lhs.colwise, LHS_NAME)
    # What the layer was given is saved already.  With a name, a loop over layers would
    # save it again.
    is_given = codes is not None and codes.rowwise is rhs.rowwise
    name = None if is_given else RHS_NAME
    saved_rhs = _to_save(recipe.dlhs, w, rhs.colwise, rhs.rowwise, name)
    return y, SavedMatmul(saved_lhs, saved_rhs, checkpoint_name(seed, SEED_NAME), rows)


def _to_save(
    gemm: Gemm,
    operand: jax.Array | None,
    forward_codes: Quantized | None,
    codes: Quantized | None,
    name: str | None,
) -> Quantized | jax.Array:
    """The form in which a backward GEMM reads X or W.

    Only codes get a checkpoint name, so ``save_codes`` recomputes an unquantized
    operand.
    """
    if gemm.in_floats and gemm.keeps == "floats" and operand is not None:
        return operand
    saved = forward_codes if gemm.in_floats else codes
    assert saved is not None
    saved = dataclasses.replace(saved, residual=None)
    return saved if name is None else checkpoint_name(_in_words(saved), name)


def _in_words(x: Quantized) -> Quantized:
    """The same with four codes in a word, if rows have whole blocks, as shards do.

    For XLA, it is the same memory.  A loop over layers begins with zeros in place of
    what they save, which XLA writes four times as fast in words.
    """
    *lead, size = x.codes.shape
    has_blocks = isinstance(size, int) and size % _BLOCK == 0
    if jax.default_backend() == "tpu" or not has_blocks:
        return x
    codes = x.codes.reshape(*lead, size // 4, 4)
    return _with_codes(x, lax.bitcast_convert_type(codes, jnp.int32))


def _in_codes(x: Tree, recipe: Recipe) -> Tree:
    """Reverses ``_in_words``; what is not in words stays."""
    if not isinstance(x, Quantized) or x.codes.dtype != jnp.int32:
        return x
    *lead, size = x.codes.shape
    codes = lax.bitcast_convert_type(x.codes, recipe.codes)
    return _with_codes(x, codes.reshape(*lead, 4 * size))


def _with_codes(x: Tree, codes: jax.Array) -> Tree:
    assert isinstance(x, Quantized)
    return dataclasses.replace(x, main=x.main._replace(codes=codes))


def _matmul_bwd(
    spec: Spec, saved: SavedMatmul, cotangents: tuple[jax.Array, Stats]
) -> tuple[jax.Array, jax.Array | None, None, None, None]:
    dy, _ = cotangents
    grad = quantize_cotangent(spec, saved, dy)
    return (*backward(spec, saved, grad, dy), None, None, None)


matmul.defvjp(matmul_fwd, _matmul_bwd)


def quantize_cotangent(spec: Spec, saved: SavedMatmul, dy: jax.Array) -> Layouts:
    """The codes of dY, the gradient of the product, for ``backward``."""
    seed, frozen = grad_seed(saved, dy), saved.lhs is None
    return saved.rows.quantize_grad(spec, dy, seed, frozen=frozen)


def grad_seed(saved: SavedMatmul, dy: jax.Array) -> CallSeed:
    """The seed of the gradient's noise; dY is the output's gradient."""
    return frozen_seed(saved.seed, dy) if saved.lhs is None else saved.seed


def backward(
    spec: Spec, saved: SavedMatmul, grad: Layouts, dy: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients dX and dW; a frozen layer has no dW.

    Args:
      spec: the static settings.
      saved: what the forward pass saved.
      grad: the codes of dY.
      dy: dY itself; read by unquantized GEMMs only.
    """
    lhs, rhs, seed, rows = saved
    lhs, rhs = _in_codes(lhs, spec.recipe), _in_codes(rhs, spec.recipe)
    if spec.recipe.dlhs.in_floats:
        assert dy is not None
        # Colwise codes are W' already.
        w = rhs.dequantize(spec.rhs_dtype) if isinstance(rhs, Quantized) else rhs.mT
        dx = rows.multiply_in_float(dy, w, spec.lhs_dtype)
    else:
        assert isinstance(rhs, Quantized)
        assert grad.rowwise is not None
        dx = rows.dlhs(spec, grad.rowwise, rhs, seed)
    if lhs is None:
        dw = None
    elif spec.recipe.drhs.in_floats:
        assert dy is not None
        x = lhs.dequantize(spec.lhs_dtype) if isinstance(lhs, Quantized) else lhs
        dw = rows.drhs_in_float(x, dy, spec.rhs_dtype)
    else:
        assert isinstance(lhs, Quantized)
        assert grad.colwise is not None
        dw = rows.drhs(spec, lhs, grad.colwise, seed)
    return dx, dw


def float_matmul(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """``[B, M, K]`` times ``[B, K, N]``, unquantized, rounded once to ``dtype``.

    Devices sum their partial products in ``dtype`` or the operands' dtype, whichever is
    wider.
    """
    # Two different dtypes of 16 and 32 bits have float32 as their common dtype.
    common = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    wider = dtype if dtype == common else jnp.float32
    return lax.dot_general(
        lhs.astype(common),
        rhs.astype(common),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=wider,
    ).astype(dtype)
