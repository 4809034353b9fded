"""A Llama trained with ``fallback_dot``: the example to copy from."""
