"""The commands of the pages about the Llama example run, on tiny models."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.llama import hf
from tests.examples.small import random_params, small_config
from tests.examples.test_gguf import bytewise, source
from tests.examples.test_gguf_reader import write
from tests.test_documents import ROOT, blocks

pytestmark = pytest.mark.exhaustive

SHORT = "--batch 1 --seq 128 --steps 1 --eval-every 1 --save-every 1"
TINY = "--hidden 128 --ffn 256 --layers 1 --heads 2 --kv-heads 1"


def commands(page: str) -> Iterator[str]:
    """The commands of a page in a shell, of short runs of tiny models."""
    scripts = [text for language, text in blocks(ROOT / page) if language == "sh"]
    lines = "".join(scripts).replace("\\\n", " ").splitlines()
    for i, line in enumerate(lines):
        command = line.partition("#")[0].strip()
        train = "python -m examples.llama.train"
        command = re.sub(
            r'^make train(?: ARGS="?(.*?)"?)?$', rf"{train} \1", command
        ).strip()
        if command.startswith(train) and "--resume" not in command:
            sizes = "" if "--from-hf" in command else TINY
            writes = "--out" not in command and "--eval-only" not in command
            out = f"--out runs/{i}" if writes else ""
            command += f" {sizes} {SHORT} {out}"
        # The tests run in an environment that has what the page installs.
        if command and not command.startswith(("make .venv/", "source ")):
            yield re.sub("^python", sys.executable, command)


def run(page: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    for command in commands(page):
        result = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


def write_text(folder: Path) -> None:
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"def f{i}(): pass\n" * 200)


def write_checkpoint(folder: Path, family: str, **settings: bool) -> None:
    """A random model in whole blocks, with a tokenizer and a chat template."""
    config = small_config(
        hidden_size=128, intermediate_size=256, num_layers=1, vocab_size=384, **settings
    )
    like = source(folder.with_name("like"), config, family, bytewise())
    hf.save(folder, config, random_params(config), like=like)
    shutil.rmtree(like)


def test_training_fine_tuning_and_export(tmp_path: Path) -> None:
    write_text(tmp_path / "my_text")
    (tmp_path / "chats.txt").write_text("hello world\n" * 5000)
    write_checkpoint(tmp_path / "Llama-3.2-1B", "llama")
    write_checkpoint(tmp_path / "Qwen2.5-0.5B-Instruct", "qwen2", qkv_bias=True)
    sizes = {"hidden_size": 128, "num_layers": 1}
    like = source(tmp_path / "like", small_config(**sizes), "llama", bytewise())
    write(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", like=like, **sizes)
    run("docs/guides/train-a-llama.md", tmp_path)
    assert (tmp_path / "runs/chat/gguf/model-Q8_0.gguf").is_file()
    shutil.rmtree(tmp_path / "runs/chat/gguf")
    run("docs/guides/serving.md", tmp_path)
    found = {path.name for path in (tmp_path / "runs/chat").iterdir()}
    assert found >= {"gguf", "compressed-tensors", "blockwise_int8"}
