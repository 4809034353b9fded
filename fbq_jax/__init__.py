"""INT8 training for Flax: an injectable ``dot_general`` with dynamic fallback.

>>> from flax import linen as nn
>>> layer = nn.Dense(4096, dot_general=fallback_dot)
"""

from fbq_jax import int8_flow as int8_flow
from fbq_jax import nnx as nnx
from fbq_jax import nonlinear as nonlinear
from fbq_jax import optim as optim
from fbq_jax import recipes as recipes
from fbq_jax import smooth_swiglu as smooth_swiglu
from fbq_jax import testing as testing
from fbq_jax.dot_general import Stats as Stats
from fbq_jax.dot_general import dot_general as dot_general
from fbq_jax.fused import fuses as fuses
from fbq_jax.linen import FallbackDot as FallbackDot
from fbq_jax.linen import fallback_dot as fallback_dot
from fbq_jax.linen_conv import FallbackConv as FallbackConv
from fbq_jax.linen_conv import fallback_conv as fallback_conv
from fbq_jax.linen_einsum import Einsum as Einsum
from fbq_jax.linen_einsum import FallbackEinsum as FallbackEinsum
from fbq_jax.linen_einsum import fallback_einsum as fallback_einsum
from fbq_jax.linen_fp8 import Fp8Dot as Fp8Dot
from fbq_jax.linen_fp8 import fp8_dot as fp8_dot
from fbq_jax.linen_fused import GatedMLP as GatedMLP
from fbq_jax.linen_fused import NormDense as NormDense
from fbq_jax.linen_int8_flow import Int8Attention as Int8Attention
from fbq_jax.linen_int8_flow import Int8MLP as Int8MLP
from fbq_jax.linen_int8_flow import Int8Sequential as Int8Sequential
from fbq_jax.linen_norms import LayerNorm as LayerNorm
from fbq_jax.linen_norms import RMSNorm as RMSNorm
from fbq_jax.linen_rules import RulesDot as RulesDot
from fbq_jax.llm_int8 import LlmInt8Dot as LlmInt8Dot
from fbq_jax.llm_int8 import llm_int8_dot as llm_int8_dot
from fbq_jax.qtensor import QTensor as QTensor
from fbq_jax.ragged import ragged_dot as ragged_dot
from fbq_jax.recipe import FLOAT_GEMM as FLOAT_GEMM
from fbq_jax.recipe import Gemm as Gemm
from fbq_jax.recipe import Recipe as Recipe
from fbq_jax.recipe import RecipeError as RecipeError
from fbq_jax.remat import save_codes as save_codes
from fbq_jax.rules import RulesReport as RulesReport
from fbq_jax.serve import freeze as freeze
from fbq_jax.smooth_swiglu import SmoothSwiGLU as SmoothSwiGLU
from fbq_jax.stats import assert_live as assert_live
from fbq_jax.stats import fallback_stats as fallback_stats
