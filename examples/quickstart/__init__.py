"""Complete small programs to copy from, one in Linen and one in NNX."""
