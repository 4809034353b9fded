"""Quantization and INT8 GEMMs of arrays: definitions in ``jax.numpy``, and kernels.

``reference``, ``fused_reference`` and ``grouped_reference`` define the ops.  The
packages ``triton`` and ``mosaic`` implement them for GPUs.
"""
