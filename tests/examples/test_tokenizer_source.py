"""The tokenizers of runs, for the models that they export."""

import json
import subprocess
import sys

import numpy as np
import pytest

from examples.llama.config import Config
from examples.llama.text import (
    Bytes,
    TokenizerOf,
    byte_tokenizer,
    codec_of_run,
    tokenizer_source,
)
from tests.examples.make_hf_fixture import FIXTURE
from tests.examples.small import small_config

TEXT = "naïve\tcode  x = {1: '日本語 😀'}\r\n\n\0 end"


def test_bytes_are_their_own_ids():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(TEXT).ids == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


@pytest.mark.parametrize("name", ["text.txt", ".", "ids.bin"])
def test_a_run_has_the_tokenizer_of_its_data(tmp_path, name):
    data, is_text = tmp_path / name, name == "text.txt"
    if is_text:
        data.write_text(TEXT)
    else:
        np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
        np.arange(9, dtype=np.uint16).tofile(tmp_path / "ids.bin")
        byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    codec = codec_of_run(Config(data=str(data)))
    assert isinstance(codec, Bytes if is_text else TokenizerOf)
    assert codec.encode(TEXT) == list(TEXT.encode())
    with tokenizer_source(Config(data=str(data)), small_config()) as folder:
        assert folder is not None
        assert (folder / "tokenizer.json").is_file()
        stored = json.loads((folder / "config.json").read_text())
        assert stored["model_type"] == "llama"
        # A NUL byte separates documents.
        assert stored.get("eos_token_id") == (0 if is_text else None)
    assert not folder.exists()


def test_a_tuned_model_has_the_tokenizer_of_its_checkpoint():
    config = Config(from_hf=str(FIXTURE / "llama"))
    with tokenizer_source(config, small_config()) as folder:
        assert folder == FIXTURE / "llama"


def test_ids_of_tokens_alone_have_no_tokenizer(tmp_path):
    file = tmp_path / "ids.bin"
    np.arange(9, dtype=np.uint16).tofile(file)
    with tokenizer_source(Config(data=str(file)), small_config()) as folder:
        assert folder is None


@pytest.mark.exhaustive
def test_text_without_a_tokenizer_imports_no_transformers(tmp_path):
    (tmp_path / "text").write_text(TEXT * 100)
    program = """if True:
        import sys
        from examples.llama import generate, train
        from examples.llama.build import build
        from examples.llama.config import Config
        build(Config(data=sys.argv[1]))
        print("transformers" in sys.modules)
    """
    command = [sys.executable, "-c", program, tmp_path / "text"]
    assert subprocess.check_output(command, text=True) == "False\n"
