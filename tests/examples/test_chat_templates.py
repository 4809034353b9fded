"""Chat templates are filled in as transformers fills them in, or are one error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.llama.errors import UserError
from examples.llama.hf.files import CheckpointError
from examples.llama.text import TokenizerOf, byte_tokenizer

ROOT = Path(__file__).parents[2]
# In the manner of real models.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}"
        "{% set rest, system = messages[1:], messages[0].content %}"
        "{% else %}{% set rest, system = messages, false %}{% endif %}"
        "{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must take turns') }}{% endif %}"
        "{% set content = '<<SYS>>' ~ system ~ '<</SYS>>' ~ m.content "
        "if loop.first and system else m.content %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% endfor %}"
    ),
    "llama3": """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{{- "<|system|>\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
    {{- "Functions: " }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n\\n'+ message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n\\n' }}
{%- endif %}
""",
    "mistral": (
        "{%- set system = messages[0].content if messages[0].role == 'system' %}"
        "{{- bos_token }}{%- for m in messages | selectattr('role', 'ne', 'system') %}"
        "{%- if m.role == 'user' %}"
        "{%- if loop.last and tools is not none and tools | length %}"
        "{{- '[TOOLS]' + (tools | map(attribute='name') | list | tojson) }}{%- endif %}"
        "{{- '[INST] ' + m['content'] + '[/INST]' }}"
        "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
        "{%- else %}{{- raise_exception('Only user and assistant!') }}{%- endif %}"
        "{%- endfor %}"
    ),
    "qwen": """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
        and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
    {{- '\\n' ~ ns.last }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "smollm3": """
{# ───── defaults ───── #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- if xml_tools or (python_tools and not tools) -%}tools{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\\nMode: " ~ mode ~ "<|im_end|>\\n" -}}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}
    {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}
    {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {% endgeneration %}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ "<|im_start|>assistant\\n" }}
{%- else -%}
  {{ "" }}
{%- endif -%}
""",
    "generation": """{% set x = 'outer' %}
{% for m in messages %}
  {%- generation -%}
  {% set x = 'inner' %}{% set y = x %}
    {{ x }} {{ loop.index }}: {{ m.content }}
  {%- endgeneration %}
  {{ x }} {{ y is defined }}
{% endfor %}
{% generation %}empty{% endgeneration %}
""",
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + "
        "'<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
    ),
    "deepseek": (
        "{% if not add_generation_prompt is defined %}"
        "{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(is_first=false, is_tool=false, system='') %}"
        "{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}"
        "{{bos_token}}{{ns.system}}{%- for message in messages %}"
        "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
        "{{'<|User|>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is none %}"
        "{%- for tool in message['tool_calls']%}{{tool['type']}}{%- endfor %}"
        "{%- endif %}{%- endfor -%}{% if ns.is_tool %}{{'<|tool|>'}}{% endif %}"
        "{% if add_generation_prompt and not ns.is_tool %}{{'<|AI|>'}}{% endif %}"
    ),
    "phi3": (
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
        "{% elif message['role'] == 'user' %}"
        "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n"
        "{% endif %}\n{% endfor %}"
    ),
    "loop controls": (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i == 5 %}{% break %}{% endif %}{{ i }},{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    ),
    "macros": (
        "{%- macro turn(role, content, end='<|end|>') -%}"
        "<|{{ role }}|>{{ content | trim }}{{ end }}{% if caller %}{{ caller() }}"
        "{% endif %}{%- endmacro -%}"
        "{%- macro listed(items) %}{% for x in items %}- {{ x }}\n{% endfor %}"
        "{% endmacro -%}"
        "{% for m in messages %}{{ turn(m.role, m.content) }}{% endfor %}"
        "{% call turn('assistant', '', end='') %} now {% endcall %}"
        "{{ listed(['a', 'b']) }}"
    ),
    "tojson": (
        "{{ messages | tojson }}\n{{ messages[0] | tojson(indent=2) }}\n"
        "{{ {'b': 1.5, 'a': [none, true, '<&\\'\">é']} | tojson(sort_keys=true) }}\n"
        "{{ messages[0].content | tojson(ensure_ascii=true) }}\n"
        "{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}{{ tools | tojson }}"
    ),
    "html": "{{ messages[0].content }} {{ '<b>&' | e }} {{ '<i>' ~ '<u>' | safe }}",
    "nothing given": (
        "{{ tools is none }} {{ documents is none }} {{ tools is defined }} "
        "{{ add_generation_prompt }} {{ xml_tools is defined }} [{{ unknown }}]"
        "{% if not documents %}no documents{% endif %}{{ unk_token is defined }}"
    ),
    "special tokens": (
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}"
        "{{ sep_token is defined }}{{ add_bos_token is defined }}{{ unk_token }}"
    ),
    "whitespace": (
        "\n  {% if true %}\n    a\n  {% endif %}\n\n  {#- gone -#}  \n"
        "  {%+ if true %}  b  {%+ endif %}\n{{ messages[0].content }}\n\n"
    ),
    "line ends": "a\r\n{% if true %}\r\nb{% endif %}\r\n{{ messages[0].content }}\r\n",
    "strings": (
        "{% set c = messages[0].content %}{{ c.split('\\n')[-1].upper().strip() }}"
        "{{ c[:3] }}{{ c | length }}{{ c | replace('a', 'b') | title }}"
        "{{ ('%s!' | format(c)) }}{{ 'x' * 3 }}{{ c.startswith('Wh') }}"
        "{{ '{:>5}'.format(1) }}{{ c is string }}{{ c | string | lower | indent(2) }}"
        "{{ c.rstrip('\\n').lstrip() }}{{ 7 // 2 }}{{ 2 ** 3 }}"
    ),
    "mappings": (
        "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"
        "{% for x in messages[0] | dictsort %}{{ x[0] }}{% endfor %}"
        "{{ messages[0].get('name', 'nobody') }}{{ messages[0].name is defined }}"
        "{{ dict(a=1, b=2) }}{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ messages[0]['content'] in ['a'] }}{{ messages[-1].role }}"
    ),
    "namespaces": (
        "{% set ns = namespace(found=false, text='') %}{% for m in messages %}"
        "{% set ns.found = true %}{% set ns.text = ns.text ~ m.content %}{% endfor %}"
        "{{ ns.found }}{{ ns.text }}{% with a = 1 %}{{ a }}{% endwith %}{{ a }}"
        "{% filter upper %}loud{% endfilter %}{% raw %}{{ raw }}{% endraw %}"
        "{% set block %}kept{% endset %}{{ block }}{{ cycler('a', 'b').next() }}"
    ),
    "dates": "{{ strftime_now('%Y-%m') }} {{ strftime_now('') }}{{ bos_token }}",
    "recursion": (
        "{% for m in messages recursive %}{{ m.content }}"
        "{% if loop.depth < 2 %}{{ loop(messages) }}{% endif %}{% endfor %}"
    ),
}
MESSAGES = ["Who are you?", "  <b>é</b> & \"quotes\" 'and' 😀\n{{ code }}\n", "", "0"]
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(folder, name):
    transformers = pytest.importorskip("transformers", reason="compares with it")
    write(folder / "chat_template.jinja", TEMPLATES[name])
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    codec = TokenizerOf(folder)
    for text in MESSAGES:
        messages = [{"role": "user", "content": text}]
        ids = loaded.apply_chat_template(messages, add_generation_prompt=True)
        assert codec.encode_chat(text) == ids["input_ids"], text


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
    ],
)
def test_templates_are_those_that_transformers_finds(folder, files):
    transformers = pytest.importorskip("transformers", reason="compares with it")
    for name, content in files.items():
        if name.endswith(".json"):
            content = CONFIG | {"chat_template": content}
        write(folder / name, content)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = loaded.apply_chat_template([{"role": "user", "content": "hi"}])
    assert TokenizerOf(folder).encode_chat("hi") == ids["input_ids"]
    assert TokenizerOf(folder).decode(ids["input_ids"]) == "default hi"


def test_the_template_of_a_processor_is_found(folder):
    write(folder / "chat_template.json", {"chat_template": DEFAULT})
    assert bytes(TokenizerOf(folder).encode_chat("hi")) == b"default hi"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_files_are_utf8_in_every_locale(folder, encoding):
    write(folder / "chat_template.jinja", "é{{ messages[0].content }}")
    program = """if True:
        import sys
        from pathlib import Path
        from examples.llama.text import TokenizerOf
        print(bytes(TokenizerOf(Path(sys.argv[1])).encode_chat(sys.argv[2])))
    """
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", program, folder, "ü😀"]
    printed = subprocess.check_output(command, env=os.environ | locale, cwd=ROOT)
    assert printed.decode().strip() == repr("éü😀".encode())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"chat_template.jinja": b"caf\xe9"}, "jinja is not a chat template: .*0xe9"),
        ({"chat_template.jinja/file": b""}, "jinja is not a chat template: .*director"),
        ({f"{MORE}default.jinja": b"\xff"}, "default.jinja is not a chat template"),
        ({f"{MORE}rag.jinja": "a"}, "no default chat template, but rag"),
        ({"chat_template.json": b"\xff\xff"}, "chat_template.json is not JSON"),
        ({"chat_template.json": ["a"]}, "chat_template.json does not hold a JSON obj"),
        ({"tokenizer_config.json": 5}, "config.json: chat_template takes .* got 5"),
        ({"tokenizer_config.json": []}, "chat_template takes text, .* got None"),
        ({"tokenizer_config.json": {"default": 5}}, "one is named default, got 5"),
        ({"tokenizer_config.json": NAMED[:1]}, "of which one is named default, got"),
        ({"tokenizer_config.json": ["a"]}, "has chat templates without names"),
        ({"tokenizer_config.json": [{"name": "a"}]}, "without names: 'template'"),
        ({"tokenizer_config.json": [{"name": []}]}, "config.json has chat templates"),
        ({"chat_template.jinja": "{% for %}"}, "cannot be filled in: Expected an"),
        ({"chat_template.jinja": "{% generation %}"}, "cannot be filled in: "),
        ({"chat_template.jinja": "{{ messages.x.y }}"}, "filled in: .*has no attr"),
        ({"chat_template.jinja": "{{ x | tojson }}"}, "Undefined is not JSON"),
        ({"chat_template.jinja": "{{ raise_exception('no!') }}"}, "in: no!"),
        ({"chat_template.jinja": "{{ 1 / 0 }}"}, "filled in: division by zero"),
        ({"chat_template.jinja": "{{ ''.__class__.mro() }}"}, "unsafe"),
        (
            {"chat_template.jinja": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"},
            "recursion",
        ),
        ({"chat_template.jinja": "{% include 'a' %}"}, "cannot be filled in: "),
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
    if "filled" not in str(caught.value):
        assert isinstance(caught.value, CheckpointError)
        assert str(folder) in str(caught.value)
