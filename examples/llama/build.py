"""Builds the model and the data of a run from its options."""

import dataclasses
from pathlib import Path
from typing import Any

from examples.llama import hf
from examples.llama.config import SAVED_BITS, Config, ConfigError
from examples.llama.data import Corpus, DataError, is_token_ids, load_corpus
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.step import PyTree


def build(config: Config) -> tuple[Llama, PyTree | None, Corpus]:
    """Builds the model and the data of a run.

    Returns:
        The model; the weights to start from, or None to initialize new ones; and the
        data.

    Raises:
        ConfigError: The options do not fit the loaded model.
        DataError: The data cannot be read or does not fit the model.
        CheckpointError: The Hugging Face model cannot be loaded.
    """
    if config.from_hf is None:
        sizes, weights, corpus = _new_model(config)
    else:
        sizes, weights, corpus = _pretrained_model(config, config.from_hf)
    return _with_recipe(config, sizes), weights, corpus


def build_model(config: Config) -> Llama:
    """Builds the model of a run, without the data of a model that was loaded.

    Raises:
        ConfigError: The recipe does not fit the loaded model.
        DataError: The data of a new model, which sets its vocabulary, cannot be read.
        CheckpointError: The Hugging Face model cannot be loaded.
    """
    if config.from_hf is None:
        sizes, _, _ = _new_model(config)
    else:
        sizes, _ = hf.load(config.from_hf)
    return _with_recipe(config, sizes)


def _with_recipe(config: Config, sizes: LlamaConfig) -> Llama:
    dot_general, saved_bits = config.dot_general(), config.saved_bits
    if saved_bits is None and dot_general is not None:
        saved_bits = SAVED_BITS
    if sizes.num_experts is not None:
        config.check_recipe_of_experts()
    sizes = dataclasses.replace(
        sizes,
        remat=config.remat,
        unroll=config.unroll,
        saved_bits=saved_bits or None,
    )
    return Llama(sizes, dot_general)


def _new_model(config: Config) -> tuple[LlamaConfig, None, Corpus]:
    corpus = load_corpus(_data_path(config))
    experts: dict[str, Any] = {}
    width = config.ffn
    if config.experts is not None:
        assert config.top_k is not None
        # The weight of one expert would always be 1 if it were renormalized.
        renormalize = config.top_k > 1
        experts = {"num_experts": config.experts, "top_k": config.top_k}
        experts |= {"renormalize": renormalize}
        width //= config.top_k
    sizes = LlamaConfig(
        vocab_size=corpus.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=width,
        **experts,
        num_layers=config.layers,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        max_seq_len=config.seq,
    )
    return sizes, None, corpus


def _pretrained_model(
    config: Config, folder: str
) -> tuple[LlamaConfig, PyTree, Corpus]:
    sizes, weights = hf.load(folder)
    data, tokenizer = _data_path(config), None
    if not is_token_ids(data):
        tokenizer = hf.load_tokenizer(folder)
        if tokenizer is None:
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
    return sizes, weights, corpus


def _data_path(config: Config) -> Path | None:
    return None if config.data is None else Path(config.data)
