"""INT8 training for Flax: an injectable ``dot_general`` with dynamic fallback.

>>> from flax import linen as nn
>>> layer = nn.Dense(4096, dot_general=fallback_dot)
"""

import sys

from fbq_jax import export as export
from fbq_jax import int8_flow as int8_flow
from fbq_jax import linen as linen
from fbq_jax import nnx as nnx
from fbq_jax import optim as optim
from fbq_jax import recipes as recipes
from fbq_jax import testing as testing
from fbq_jax.core import nonlinear as nonlinear
from fbq_jax.core.checkpoint_policies import save_codes as save_codes
from fbq_jax.core.dot_general import Stats as Stats
from fbq_jax.core.dot_general import dot_general as dot_general
from fbq_jax.core.fused_layers import fuses as fuses
from fbq_jax.core.layer_stats import LayerStats as LayerStats
from fbq_jax.core.layer_stats import assert_live as assert_live
from fbq_jax.core.layer_stats import fallback_stats as fallback_stats
from fbq_jax.core.llm_int8 import LlmInt8Dot as LlmInt8Dot
from fbq_jax.core.llm_int8 import llm_int8_dot as llm_int8_dot
from fbq_jax.experts.expert_sharding import ExpertSharding as ExpertSharding
from fbq_jax.experts.ragged_dot import ragged_dot as ragged_dot
from fbq_jax.experts.routing import Routing as Routing
from fbq_jax.fp8 import smooth_swiglu as smooth_swiglu
from fbq_jax.fp8.smooth_swiglu import SmoothSwiGLU as SmoothSwiGLU
from fbq_jax.linen import Einsum as Einsum
from fbq_jax.linen import FallbackConv as FallbackConv
from fbq_jax.linen import FallbackDot as FallbackDot
from fbq_jax.linen import FallbackEinsum as FallbackEinsum
from fbq_jax.linen import Fp8Dot as Fp8Dot
from fbq_jax.linen import GatedMLP as GatedMLP
from fbq_jax.linen import Int8Attention as Int8Attention
from fbq_jax.linen import Int8MLP as Int8MLP
from fbq_jax.linen import Int8Sequential as Int8Sequential
from fbq_jax.linen import LayerNorm as LayerNorm
from fbq_jax.linen import MoEMLP as MoEMLP
from fbq_jax.linen import NormDense as NormDense
from fbq_jax.linen import RMSNorm as RMSNorm
from fbq_jax.linen import RulesDot as RulesDot
from fbq_jax.linen import choose_recipes as choose_recipes
from fbq_jax.linen import fallback_conv as fallback_conv
from fbq_jax.linen import fallback_dot as fallback_dot
from fbq_jax.linen import fallback_einsum as fallback_einsum
from fbq_jax.linen import fp8_dot as fp8_dot
from fbq_jax.linen import freeze as freeze
from fbq_jax.linen import quantize as quantize
from fbq_jax.linen import quantize_weights_once as quantize_weights_once
from fbq_jax.ops import dispatch as dispatch
from fbq_jax.quantized import Quantized as Quantized
from fbq_jax.recipes.rules_report import RulesReport as RulesReport
from fbq_jax.recipes.schema import FLOAT_GEMM as FLOAT_GEMM
from fbq_jax.recipes.schema import Gemm as Gemm
from fbq_jax.recipes.schema import Recipe as Recipe
from fbq_jax.recipes.schema import RecipeError as RecipeError

__version__ = "0.2.0"

# Public modules of the packages can also be imported from here: fbq_jax.nonlinear.
for _name in ("dispatch", "nonlinear", "smooth_swiglu"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]
