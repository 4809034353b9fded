"""Measures what the library costs on the GPU at hand: ``python -m fbq_jax.bench``."""
