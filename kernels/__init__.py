"""Quantization and INT8 GEMMs of arrays: definitions in ``jax.numpy``, and kernels.

``reference`` and the modules ``*_reference`` define the ops.  The packages ``triton``
and ``mosaic`` implement them for GPUs, ``tpu`` for TPUs.
"""
