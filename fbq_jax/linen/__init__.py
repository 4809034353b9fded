"""Quantized layers for Flax Linen: ``nn.Dense(..., dot_general=fallback_dot)``."""

from fbq_jax.linen.choosing import choose_recipes as choose_recipes
from fbq_jax.linen.conv import FallbackConv as FallbackConv
from fbq_jax.linen.conv import fallback_conv as fallback_conv
from fbq_jax.linen.dot import FallbackDot as FallbackDot
from fbq_jax.linen.dot import fallback_dot as fallback_dot
from fbq_jax.linen.einsum import Einsum as Einsum
from fbq_jax.linen.einsum import FallbackEinsum as FallbackEinsum
from fbq_jax.linen.einsum import fallback_einsum as fallback_einsum
from fbq_jax.linen.fp8 import Fp8Dot as Fp8Dot
from fbq_jax.linen.fp8 import fp8_dot as fp8_dot
from fbq_jax.linen.freezing import freeze as freeze
from fbq_jax.linen.fused import GatedMLP as GatedMLP
from fbq_jax.linen.fused import NormDense as NormDense
from fbq_jax.linen.int8_flow import Int8Attention as Int8Attention
from fbq_jax.linen.int8_flow import Int8MLP as Int8MLP
from fbq_jax.linen.int8_flow import Int8Sequential as Int8Sequential
from fbq_jax.linen.moe import MoEMLP as MoEMLP
from fbq_jax.linen.norms import LayerNorm as LayerNorm
from fbq_jax.linen.norms import RMSNorm as RMSNorm
from fbq_jax.linen.rules import RulesDot as RulesDot
from fbq_jax.linen.step_codes import quantize_weights_once as quantize_weights_once
from fbq_jax.linen.whole_models import quantize as quantize
