"""An optimizer step of a Llama that accumulates the gradients of microbatches."""

from experiments.bench import train

# (hidden, intermediate, layers, sequences of a microbatch, microbatches): TinyLlama's
# 1.1 billion parameters, with 8192 and with 2048 tokens at a time.
SHAPES = ((2048, 5632, 22, 4, 4), (2048, 5632, 22, 1, 4))
rows = train.rows
