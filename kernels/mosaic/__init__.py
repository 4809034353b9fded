"""The block-scaled INT8 GEMM for Hopper, as a Pallas Mosaic GPU kernel."""
