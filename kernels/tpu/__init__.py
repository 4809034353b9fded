"""TPU kernels in Pallas."""
