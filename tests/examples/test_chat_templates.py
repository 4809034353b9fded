"""Chat templates are filled in as transformers fills them in, or are one error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.llama.errors import UserError
from examples.llama.text import TokenizerOf, byte_tokenizer

ROOT = Path(__file__).parents[2]
# What only transformers' templates have, and prompts.
TEMPLATES = {
    "{% generation %}A: {{ messages[0].content }}{% endgeneration %}": "A: é",
    "{{ tools is none }} {{ documents is none }} {{ xml_tools }}": "True True ",
    "{{ messages[0].content | tojson }} {{ {'a': '<é>'} | tojson }}": (
        '"é" {"a": "<é>"}'
    ),
    "{{ bos_token }}{{ eos_token }}{{ image_token }}[{{ pad_token }}]": (
        "<s></s><image>[]"
    ),
    "{{ strftime_now('20') }}{% for m in messages %}{% break %}{% endfor %}": "20",
    "{% if add_generation_prompt %}\n  {{ 'A:' }}\n{% endif %}\n": "  A:\n",
}
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False},
    "pad_token": None,
    "image_token": "<image>",
    "add_bos_token": True,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
}


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", CONFIG)
    return tmp_path


def write(file, content):
    file.parent.mkdir(exist_ok=True)
    if not isinstance(content, bytes | str):
        content = json.dumps(content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(("template", "prompt"), TEMPLATES.items())
def test_prompts_are_those_of_transformers(folder, template, prompt):
    write(folder / "chat_template.jinja", template)
    codec = TokenizerOf(folder)
    # Special tokens have ids of their own.
    assert codec.encode_chat("é") == codec.encode(prompt)


DEFAULT, OTHER = "default {{ messages[0].content }}", "other"
NAMED = [{"name": "tool_use", "template": OTHER}]
NAMED += [{"name": "default", "template": DEFAULT}]
MORE = "additional_chat_templates/"


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": DEFAULT},
        {"chat_template.jinja": DEFAULT, "tokenizer_config.json": OTHER},
        {"tokenizer_config.json": DEFAULT},
        {"tokenizer_config.json": NAMED},
        {"tokenizer_config.json": {x["name"]: x["template"] for x in NAMED}},
        {"tokenizer_config.json": DEFAULT, "chat_template.json": OTHER},
        {"chat_template.jinja": DEFAULT, f"{MORE}tool_use.jinja": OTHER},
        {f"{MORE}default.jinja": DEFAULT, "tokenizer_config.json": OTHER},
        {f"{MORE}default.jinja": DEFAULT, "chat_template.jinja": OTHER},
        {f"{MORE}notes.txt": OTHER, "tokenizer_config.json": DEFAULT},
        {"chat_template.json": DEFAULT},
    ],
)
def test_templates_are_those_that_transformers_finds(folder, files):
    for name, content in files.items():
        if name.endswith(".json"):
            content = CONFIG | {"chat_template": content}
        write(folder / name, content)
    codec = TokenizerOf(folder)
    assert codec.decode(codec.encode_chat("hi")) == "default hi"


def test_files_are_utf8_in_every_locale(folder):
    write(folder / "chat_template.jinja", "é{{ messages[0].content }}")
    program = """if True:
        import sys
        from pathlib import Path
        from examples.llama.text import TokenizerOf
        print(bytes(TokenizerOf(Path(sys.argv[1])).encode_chat(sys.argv[2])))
    """
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", program, folder, "ü😀"]
    printed = subprocess.check_output(command, env=os.environ | locale, cwd=ROOT)
    assert printed.decode().strip() == repr("éü😀".encode())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"chat_template.jinja": b"caf\xe9"}, "jinja is not a chat template: .*0xe9"),
        ({"chat_template.jinja/file": b""}, "jinja is not a chat template: .*director"),
        ({f"{MORE}default.jinja": b"\xff"}, "default.jinja is not a chat template"),
        ({f"{MORE}rag.jinja": "a"}, "filled in: .* no default .* names are .'rag'"),
        ({"chat_template.json": b"\xff\xff"}, "chat_template.json is not JSON"),
        ({"chat_template.json": ["a"]}, "chat_template.json does not hold a JSON obj"),
        ({"tokenizer_config.json": 5}, "cannot be filled in: Can't compile non temp"),
        ({"tokenizer_config.json": ["a"]}, "cannot read tokenizer.json, tokenizer_con"),
        ({"chat_template.jinja": "{% for %}"}, "cannot be filled in: Expected an"),
        ({"chat_template.jinja": "{{ raise_exception('no!') }}"}, "in: no!"),
        ({"chat_template.jinja": "{{ ''.__class__.mro() }}"}, "unsafe"),
        ({"tokenizer_config.json": "\ud800"}, "filled-in chat template is not UTF-8"),
    ],
)
def test_templates_that_cannot_be_used_are_named(folder, files, message):
    for name, content in files.items():
        if name == "tokenizer_config.json":
            content = {"chat_template": content}
        write(folder / name, content)
    with pytest.raises(UserError, match=message) as caught:
        TokenizerOf(folder).encode_chat("hi")
    assert str(folder) in str(caught.value)
