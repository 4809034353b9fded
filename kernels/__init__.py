"""Quantization and GEMMs in INT8 and FP8: definitions in ``jax.numpy``, and kernels.

``reference`` and the modules ``*_reference`` define the ops.  The packages ``triton``
and ``mosaic`` implement them for GPUs, ``tpu`` for TPUs.
"""
