"""Quantized products and layers as functions that do not depend on Flax."""
