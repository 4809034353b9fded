"""The block-scaled GEMMs of INT8 and FP8 for Hopper, as Pallas Mosaic GPU kernels."""
