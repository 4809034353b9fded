"""Checkpoints of the families: Hugging Face folders, and GGUF files."""

import os

from examples.llama.hf.checkpoint import is_checkpoint as is_checkpoint
from examples.llama.hf.checkpoint import load as load
from examples.llama.hf.checkpoint import load_tokenizer as load_tokenizer
from examples.llama.hf.checkpoint import open_tokenizer as open_tokenizer
from examples.llama.hf.checkpoint import quantization as quantization
from examples.llama.hf.checkpoint import save as save
from examples.llama.hf.export import FORMATS as FORMATS
from examples.llama.hf.export import check_exportable as check_exportable
from examples.llama.hf.export import export as export
from examples.llama.hf.files import CheckpointError as CheckpointError
from examples.llama.hf.gguf_reader import is_gguf as is_gguf
from examples.llama.hf.gguf_reader import write_folder as write_folder

# transformers would say at each start that it found no PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
