"""The named recipes: dynamic fallback, and the methods that it is compared with.

``docs/methods/recipes.md`` compares them in a table.  ``dataclasses.replace`` makes
variants: ``replace(jetfire, block=64)`` is Jetfire with larger blocks, and
``replace(rowwise, drhs=FLOAT_GEMM)`` leaves one GEMM of ``rowwise`` unquantized.
"""

from dataclasses import replace

from fbq_jax.recipes.schema import FLOAT_GEMM, Gemm, Recipe

# An unquantized backward GEMM that reads the dequantized forward codes.
_FLOAT_GEMM_OF_CODES = Gemm(lhs=None, rhs=None, keeps="codes")

#: Dynamic block-level fallback (arXiv 2503.08040): 128x128 blocks, and two INT8 terms
#: for activation blocks with an outlier in the forward GEMM.
fallback = Recipe()

#: ``fallback`` without fallback: plain INT8 with one scale per block.
block = replace(fallback, criterion=None)

#: The forward GEMM of ``fallback``; backward GEMMs with one scale per row or
#: column.
fallback_rowwise_bwd = Recipe(
    dlhs=Gemm(lhs="stochastic", scales="row"),
    drhs=Gemm(lhs="stochastic", rhs="stochastic", scales="row"),
)

#: INT8 in the layout of DeepSeek-V3's FP8: a scale for 1x128 values of X and dY, along
#: the contraction, and for 128x128 values of W.
row_block = Recipe(
    criterion=None,
    fwd=Gemm(scales=("row_block", "block")),
    dlhs=Gemm(lhs="stochastic", scales=("row_block", "block")),
    drhs=Gemm(lhs="stochastic", rhs="stochastic", scales="row_block"),
)

#: ``row_block`` for the left operand of each product, which is X or dY.  The right one,
#: W or, in dW, dY, has a scale per block.  In ``row_block``, both operands of dW have a
#: scale for each row, and on an H200 that product takes 1.5 to 1.6 times as long.
row_block_lhs = replace(
    row_block, drhs=replace(row_block.drhs, scales=("row_block", "block"))
)

#: DeepSeek-V3's FP8 (arXiv 2412.19437): ``row_block`` with codes in E4M3, rounded to
#: nearest.
fp8_row_block = Recipe(
    codes="float8_e4m3fn",
    criterion=None,
    fwd=Gemm(scales=("row_block", "block")),
    dlhs=Gemm(scales=("row_block", "block")),
    drhs=Gemm(scales="row_block"),
)

#: ``fp8_row_block`` with one scale per block of dY in dW, as in ``row_block_lhs``.
fp8_row_block_lhs = replace(
    fp8_row_block, drhs=replace(fp8_row_block.drhs, scales=("row_block", "block"))
)

#: Jetfire's linear layer (arXiv 2403.12422): 32x32 blocks, the forward codes of X also
#: in dW, and stochastic rounding of dY only.
jetfire = Recipe(
    block=32,
    criterion=None,
    dlhs=Gemm(lhs="stochastic"),
    drhs=Gemm(rhs="stochastic"),
)

#: SwitchBack (arXiv 2304.13013): one scale per row of X and dY, one scale for W, and
#: an unquantized dW.
switchback = Recipe(
    criterion=None,
    fwd=Gemm(scales=("row", "tensor")),
    dlhs=Gemm(scales=("row", "tensor")),
    drhs=FLOAT_GEMM,
)

#: SwitchBack that saves X in INT8: the unquantized dW reads the values of its codes.
switchback_m = replace(switchback, drhs=_FLOAT_GEMM_OF_CODES)

#: SwitchBack with one scale per output channel of W (in Y) or input channel (in dX).
switchback_q = Recipe(
    criterion=None,
    fwd=Gemm(scales="row"),
    dlhs=Gemm(scales="row"),
    drhs=FLOAT_GEMM,
)

#: One scale per tensor (Banner et al., arXiv 1805.11046) and stochastic gradients.
per_tensor = Recipe(
    criterion=None,
    fwd=Gemm(scales="tensor"),
    dlhs=Gemm(lhs="stochastic", scales="tensor"),
    drhs=Gemm(rhs="stochastic", scales="tensor"),
)

#: ``per_tensor`` with Banner's gradient bifurcation: an unquantized dW of dY and the
#: values of the codes of X.
per_tensor_bifurcated = replace(per_tensor, drhs=_FLOAT_GEMM_OF_CODES)

#: torchao's INT8 mixed-precision training: one scale per row and nearest rounding in
#: all three GEMMs.
rowwise = Recipe(
    criterion=None,
    fwd=Gemm(scales="row"),
    dlhs=Gemm(scales="row"),
    drhs=Gemm(scales="row"),
)

#: AQT's INT8 (``config_v4``): scales of absmax / 127.5 and an unquantized dW.  As in
#: AQT, codes are clipped to 127, so magnitudes within 1/255 of a row's largest become
#: smaller.  dX is therefore biased in spite of stochastic rounding: by 1e-3 of its size
#: for rows of 64 normal values, more for shorter ones.  A ``bound`` of 127 is unbiased.
aqt_int8 = Recipe(
    criterion=None,
    bound=127.5,
    fwd=Gemm(scales="row"),
    dlhs=Gemm(lhs="stochastic", scales="row"),
    drhs=FLOAT_GEMM,
)

#: AQT's INT8 with dW in INT8 as well, from four local shards of the tokens.  Both
#: gradients are biased by the clip: dW by 3e-3 of its size for shards of 8 tokens.
aqt_int8_local = replace(aqt_int8, drhs=Gemm(rhs="stochastic", scales="row", shards=4))

#: All named recipes, by name.
NAMED: dict[str, Recipe] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Recipe)
}


def recipe_name(recipe: Recipe) -> str:
    """The name of a named recipe; ``"Recipe(...)"`` for another one."""
    names = (name for name, named in NAMED.items() if named == recipe)
    return next(names, "Recipe(...)")


def describe_recipe(recipe: Recipe) -> str:
    """The name of a named recipe, and all settings of another one."""
    name = recipe_name(recipe)
    return name if name in NAMED else str(recipe)
