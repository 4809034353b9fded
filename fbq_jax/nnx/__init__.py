"""Quantized layers for Flax NNX: ``nnx.Linear(..., dot_general=FallbackDot())``.

``quantize`` gives every layer of a model its op; ``fallback_stats`` reports the layers'
thresholds and fallback rates; ``name_layers`` makes warnings name the layers.
"""

from fbq_jax.nnx.choosing import choose_recipes as choose_recipes
from fbq_jax.nnx.dot import FallbackConv as FallbackConv
from fbq_jax.nnx.dot import FallbackDot as FallbackDot
from fbq_jax.nnx.dot import FallbackEinsum as FallbackEinsum
from fbq_jax.nnx.dot import FallbackState as FallbackState
from fbq_jax.nnx.dot import Layer as Layer
from fbq_jax.nnx.dot import StepCodes as StepCodes
from fbq_jax.nnx.dot import evaluation as evaluation
from fbq_jax.nnx.fp8 import Fp8Dot as Fp8Dot
from fbq_jax.nnx.fp8 import Fp8Scaling as Fp8Scaling
from fbq_jax.nnx.freezing import freeze as freeze
from fbq_jax.nnx.int8_flow import Int8Attention as Int8Attention
from fbq_jax.nnx.int8_flow import Int8MLP as Int8MLP
from fbq_jax.nnx.int8_flow import Int8Sequential as Int8Sequential
from fbq_jax.nnx.moe import ExpertStats as ExpertStats
from fbq_jax.nnx.moe import MoEMLP as MoEMLP
from fbq_jax.nnx.moe import RouterLoss as RouterLoss
from fbq_jax.nnx.naming import name_layers as name_layers
from fbq_jax.nnx.norms import LayerNorm as LayerNorm
from fbq_jax.nnx.norms import RMSNorm as RMSNorm
from fbq_jax.nnx.optimizer import CodeOptimizer as CodeOptimizer
from fbq_jax.nnx.optimizer import assert_live as assert_live
from fbq_jax.nnx.optimizer import write_codes as write_codes
from fbq_jax.nnx.rules import quantize as quantize
from fbq_jax.nnx.sharing import check_unshared as check_unshared
from fbq_jax.nnx.stats import fallback_stats as fallback_stats
from fbq_jax.nnx.step_codes import quantize_weights_once as quantize_weights_once
