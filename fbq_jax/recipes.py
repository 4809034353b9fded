"""The named recipes."""

from fbq_jax.recipe import Recipe

#: Dynamic block-level fallback (arXiv 2503.08040): 128x128 blocks; activation blocks
#: with an outlier take two INT8 terms in the forward GEMM.
fallback = Recipe()

#: The same without fallback: plain INT8 with one scale a block.
block = Recipe(criterion=None)

#: The method's forward GEMM, and backward ones with a scale a row and a column.
fallback_rowwise_bwd = Recipe(backward_scales="row")
