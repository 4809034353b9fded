"""Jetfire's INT8 data flow (arXiv 2403.12422): between operators only INT8 travels."""

from fbq_jax.int8_flow.blocks import Chain as Chain
from fbq_jax.int8_flow.blocks import Residual as Residual
from fbq_jax.int8_flow.blocks import apply as apply
from fbq_jax.int8_flow.blocks import attention as attention
from fbq_jax.int8_flow.blocks import mlp as mlp
