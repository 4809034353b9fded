"""Jetfire's INT8 data flow (arXiv 2403.12422): operators exchange INT8 values only."""

from fbq_jax.int8_flow.blocks import Chain as Chain
from fbq_jax.int8_flow.blocks import SkipConnection as SkipConnection
from fbq_jax.int8_flow.blocks import apply as apply
from fbq_jax.int8_flow.blocks import attention as attention
from fbq_jax.int8_flow.blocks import mlp as mlp
