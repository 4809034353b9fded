"""Benchmarks of the Llama on this machine's GPUs."""
