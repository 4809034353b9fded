"""Builds the model and the data of a run from its options."""

import dataclasses
from pathlib import Path

from examples.llama import hf
from examples.llama.config import SAVED_BITS, Config, ConfigError
from examples.llama.data import Corpus, DataError, is_token_ids, load_corpus
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.step import PyTree


def build(config: Config) -> tuple[Llama, PyTree | None, Corpus]:
    """Builds the model, the weights to start from or None, and the data of a run.

    Raises:
        ConfigError: The options do not fit the loaded model.
        DataError: The data cannot be read or does not fit the model.
        CheckpointError: The Hugging Face model cannot be loaded.
    """
    data = None if config.data is None else Path(config.data)
    if (folder := config.from_hf) is None:
        corpus = load_corpus(data)
        return _with_recipe(config, config.sizes(corpus.vocab_size)), None, corpus
    sizes, weights = hf.load(folder)
    tokenizer = None if is_token_ids(data) else hf.load_tokenizer(folder)
    if tokenizer is None and not is_token_ids(data):
        raise DataError(
            f"{folder} has no tokenizer.json to read text with; add it, or set "
            "--data to a .bin file of the model's token ids"
        )
    corpus = load_corpus(data, tokenizer)
    corpus.check_fits(sizes.vocab_size)
    if config.seq > sizes.max_seq_len:
        raise ConfigError(
            f"seq takes at most {sizes.max_seq_len} with the model in {folder}, "
            f"got {config.seq}"
        )
    return _with_recipe(config, sizes), weights, corpus


def build_model(config: Config) -> Llama:
    """Builds the model of a run, without the data for one that was loaded."""
    if config.from_hf is None:
        return build(config)[0]
    return _with_recipe(config, hf.load(config.from_hf)[0])


def _with_recipe(config: Config, sizes: LlamaConfig) -> Llama:
    dot_general, saved_bits = config.dot_general(), config.saved_bits
    if saved_bits is None and dot_general is not None:
        saved_bits = SAVED_BITS
    if sizes.num_experts is not None:
        config.check_recipe_of_experts()
    sizes = dataclasses.replace(
        sizes, remat=config.remat, unroll=config.unroll, saved_bits=saved_bits or None
    )
    return Llama(sizes, dot_general)
