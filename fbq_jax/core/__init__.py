"""Quantized products and layers as functions without Linen or NNX."""
