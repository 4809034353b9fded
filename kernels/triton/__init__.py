"""The ops as Triton kernels, for NVIDIA GPUs of compute capability 8.0 or above."""
