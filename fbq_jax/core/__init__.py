"""Quantized products and layers as functions, without Flax."""
