"""Hugging Face checkpoints of Llama and the families of `families.py`.

A checkpoint is a folder with ``config.json`` and the weights. The weights are in
``model.safetensors``, or in the shards that ``model.safetensors.index.json`` lists.
"""

from examples.llama.hf.checkpoint import is_checkpoint as is_checkpoint
from examples.llama.hf.checkpoint import load as load
from examples.llama.hf.checkpoint import quantization as quantization
from examples.llama.hf.checkpoint import save as save
from examples.llama.hf.export import check_exportable as check_exportable
from examples.llama.hf.export import export as export
from examples.llama.hf.files import CheckpointError as CheckpointError
from examples.llama.hf.files import load_tokenizer as load_tokenizer
