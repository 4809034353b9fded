"""The ops as Triton kernels, for any NVIDIA GPU."""
