"""The GEMM as a Pallas Mosaic GPU kernel, for Hopper."""
