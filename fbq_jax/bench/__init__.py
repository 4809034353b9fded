"""Benchmarks of the library on this machine's GPU: ``python -m fbq_jax.bench``."""
