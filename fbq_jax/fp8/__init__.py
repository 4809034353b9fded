"""FP8 layers, FP8 optimizer state and Smooth-SwiGLU."""
