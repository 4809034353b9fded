"""The named recipes: the method, and what it is compared with.

``RECIPES.md`` has them side by side.  ``dataclasses.replace`` makes variants: Jetfire
with larger blocks is ``replace(jetfire, block=64)``, one GEMM of ``rowwise`` in floats
``replace(rowwise, drhs=FLOAT_GEMM)``.
"""

from fbq_jax.recipes.schema import FLOAT_GEMM, Gemm, Recipe

#: Dynamic block-level fallback (arXiv 2503.08040): 128x128 blocks; activation blocks
#: with an outlier take two INT8 terms in the forward GEMM.
fallback = Recipe()

#: The same without fallback: plain INT8 with one scale a block.
block = Recipe(criterion=None)

#: The method's forward GEMM, and backward ones with a scale a row and a column.
fallback_rowwise_bwd = Recipe(
    dlhs=Gemm(lhs="stochastic", scales="row"),
    drhs=Gemm(lhs="stochastic", rhs="stochastic", scales="row"),
)

#: Jetfire's linear layer (arXiv 2403.12422): 32x32 blocks, X's forward codes again in
#: dW, and stochastic rounding of dY alone.
jetfire = Recipe(
    block=32,
    criterion=None,
    dlhs=Gemm(lhs="stochastic"),
    drhs=Gemm(rhs="stochastic"),
)

#: SwitchBack (arXiv 2304.13013): X and dY by rows, one scale for W; dW in floats.
switchback = Recipe(
    criterion=None,
    fwd=Gemm(scales=("row", "tensor")),
    dlhs=Gemm(scales=("row", "tensor")),
    drhs=FLOAT_GEMM,
)

#: SwitchBack that keeps X in INT8, for a dW in floats of X's codes.
switchback_m = Recipe(
    criterion=None,
    fwd=Gemm(scales=("row", "tensor")),
    dlhs=Gemm(scales=("row", "tensor")),
    drhs=Gemm(lhs=None, rhs=None, keeps="codes"),
)

#: SwitchBack with a scale for each output (Y) or input (dX) channel of W.
switchback_q = Recipe(
    criterion=None,
    fwd=Gemm(scales="row"),
    dlhs=Gemm(scales="row"),
    drhs=FLOAT_GEMM,
)

#: One scale a tensor (Banner et al., arXiv 1805.11046), stochastic gradients.
per_tensor = Recipe(
    criterion=None,
    fwd=Gemm(scales="tensor"),
    dlhs=Gemm(lhs="stochastic", scales="tensor"),
    drhs=Gemm(rhs="stochastic", scales="tensor"),
)

#: The same with Banner's gradient bifurcation: dW of X's codes and of dY in floats.
per_tensor_bifurcated = Recipe(
    criterion=None,
    fwd=Gemm(scales="tensor"),
    dlhs=Gemm(lhs="stochastic", scales="tensor"),
    drhs=Gemm(lhs=None, rhs=None, keeps="codes"),
)

#: torchao's INT8 mixed-precision training: a scale a row, nearest, in all three GEMMs.
rowwise = Recipe(
    criterion=None,
    fwd=Gemm(scales="row"),
    dlhs=Gemm(scales="row"),
    drhs=Gemm(scales="row"),
)

#: AQT's INT8 (its ``config_v4``): scales of absmax / 127.5, dW in floats.
aqt_int8 = Recipe(
    criterion=None,
    bound=127.5,
    fwd=Gemm(scales="row"),
    dlhs=Gemm(lhs="stochastic", scales="row"),
    drhs=FLOAT_GEMM,
)

#: AQT's INT8 with dW in INT8 too, of four local shards of the tokens.
aqt_int8_local = Recipe(
    criterion=None,
    bound=127.5,
    fwd=Gemm(scales="row"),
    dlhs=Gemm(lhs="stochastic", scales="row"),
    drhs=Gemm(rhs="stochastic", scales="row", shards=4),
)

#: All of them, by name.
NAMED: dict[str, Recipe] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Recipe)
}
