"""The ops: ``reference`` defines them in plain ``jax.numpy``."""
