"""Hugging Face checkpoints, folders with ``config.json``, of the families."""

import os

from examples.llama.hf.checkpoint import is_checkpoint as is_checkpoint
from examples.llama.hf.checkpoint import load as load
from examples.llama.hf.checkpoint import quantization as quantization
from examples.llama.hf.checkpoint import save as save
from examples.llama.hf.export import FORMATS as FORMATS
from examples.llama.hf.export import check_exportable as check_exportable
from examples.llama.hf.export import export as export
from examples.llama.hf.files import CheckpointError as CheckpointError
from examples.llama.hf.files import load_tokenizer as load_tokenizer

# transformers would say at each start that it found no PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
