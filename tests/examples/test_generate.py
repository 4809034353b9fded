"""Generation: the cache changes no logits, and text comes out of every folder."""

import dataclasses
import io
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import fbq_jax
from examples.llama import build, generate, hf, train
from examples.llama.errors import UserError
from examples.llama.generate import Sampling, sample
from examples.llama.model import Llama, empty_cache
from examples.llama.text import Bytes, TokenizerOf, byte_tokenizer
from tests.examples.make_hf_fixture import CONFIGS, FIXTURE
from tests.examples.small import small_config
from tests.fbq_jax.linen.test_freezing import as_trained
from tests.marks import with_first_fast

FAMILIES = [name.lower() for name in CONFIGS if name != "Gemma3"]


@pytest.mark.parametrize("family", with_first_fast(["gemma3", *FAMILIES]))
def test_a_cache_changes_no_logits(family):
    config, params = hf.load(FIXTURE / family)
    model = Llama(dataclasses.replace(config, dtype=jnp.float32))
    reference = safetensors.numpy.load_file(FIXTURE / family / "reference.safetensors")
    tokens = jnp.asarray(reference["tokens"])
    apply = jax.jit(model.apply)
    cache = empty_cache(model.config, 2, tokens.shape[1] + 3)
    # The windows of the families, 5 to 11, end inside both parts.
    split, found = 11, []
    logits, cache = apply({"params": params}, tokens[:, :split], cache)
    found.append(logits)
    for position in range(split, tokens.shape[1]):
        logits, cache = apply({"params": params}, tokens[:, position, None], cache)
        found.append(logits)
    expected = reference["logits"][:, split - 1 :]
    np.testing.assert_allclose(jnp.concatenate(found, 1), expected, rtol=0, atol=1e-4)
    assert cache.length == tokens.shape[1]


@pytest.mark.exhaustive
def test_a_frozen_model_generates_what_it_computes():
    """Quantized activations share scales by rows, which differ with a cache."""
    config = small_config(hidden_size=64, intermediate_size=96, saved_bits=10)
    model = Llama(config, fbq_jax.FallbackDot(fbq_jax.Recipe(block=32)))
    tokens = jnp.arange(12)[None] * 3
    frozen = fbq_jax.freeze(model, as_trained(model, tokens), tokens)
    apply = jax.jit(model.apply)
    expected = apply(frozen, tokens)
    cache = empty_cache(config, 1, 12)
    found = []
    for start, stop in [(0, 5), *((i, i + 1) for i in range(5, 12))]:
        logits, cache = apply(frozen, tokens[:, start:stop], cache)
        found.append(logits)
    difference = jnp.concatenate(found, 1) - expected[:, 4:]
    assert jnp.linalg.norm(difference) < 0.05 * jnp.linalg.norm(expected[:, 4:])


LOGITS = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]]))


@pytest.mark.parametrize(
    ("how", "drawn"),
    [
        ({"temperature": 0.0}, {1}),
        ({"temperature": 1.0}, {0, 1, 2, 3}),
        ({"temperature": 1.0, "top_k": 2}, {1, 3}),
        ({"temperature": 1.0, "top_p": 0.3}, {1}),
        ({"temperature": 1.0, "top_p": 0.6}, {1, 3}),
        ({"temperature": 1.0, "top_p": 0.99, "top_k": 3}, {1, 2, 3}),
        ({"temperature": 0.01}, {1}),
        ({"temperature": 1.0, "top_k": 2**31 - 1}, {0, 1, 2, 3}),
    ],
)
def test_sampling_draws_the_likely_tokens(how, drawn):
    keys = jax.random.split(jax.random.key(0), 200)
    draw = jax.jit(jax.vmap(lambda key: sample(LOGITS, key, Sampling(**how))))
    tokens = np.asarray(draw(keys))
    assert tokens.dtype == np.int32
    assert set(tokens.ravel().tolist()) == drawn


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1.2e-38, 1e-38, 1e-50, 5e-324])
@pytest.mark.parametrize("others", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 1e-9}])
def test_a_tiny_temperature_draws_as_none(temperature, others):
    logits = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    key = jax.random.key(0)
    how = Sampling(temperature=temperature, **others)
    draw = jax.jit(lambda logits: sample(logits, key, how))
    for scale in 1e-3, 1.0, 1e4, 1e20, 5e37:
        scaled = jnp.asarray(logits * np.float32(scale))
        assert jnp.isfinite(scaled).all()
        expected = sample(scaled, key, Sampling(temperature=0))
        if scale / temperature > 1e6:
            np.testing.assert_array_equal(draw(scaled), expected)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role + ' ' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def chat(tmp_path):
    """The Llama fixture with a tokenizer of words and a chat template."""
    folder = Path(shutil.copytree(FIXTURE / "llama", tmp_path / "chat"))
    words = ["<s>", "<|end|>", "user", "assistant", "one", "two"]
    words += [f"w{i}" for i in range(42)]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 0), ("<|end|>", 1)]
    )
    tokenizer.add_special_tokens(["<s>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    tokens = {"bos_token": "<s>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


def test_a_prompt_is_not_ended(chat):
    codec = TokenizerOf(chat)
    assert codec.encode("one two") == [0, 4, 5]
    assert codec.decode([4, 5, 1]) == "one two"
    for encode in codec.encode, codec.encode_chat:
        with pytest.raises(UserError, match=r"prompt is not UTF-8 \(.* byte 0xff in"):
            encode("one \udcff")


def test_stop_tokens_are_those_of_generation_then_of_the_model(chat):
    assert TokenizerOf(chat).stops == {1}
    config = json.loads((chat / "config.json").read_text())
    (chat / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    assert TokenizerOf(chat).stops == {5}
    generation = chat / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert TokenizerOf(chat).stops == {1, 7}
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(hf.CheckpointError, match="eos_token_id takes a token or a"):
        TokenizerOf(chat)


def test_a_prompt_may_have_escaped_bytes_of_characters(tmp_path):
    """As Python reads the command line where the locale has ASCII."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    codec = TokenizerOf(tmp_path)
    assert bytes(codec.encode("\udcc3\udca9")) == "é".encode()
    assert bytes(codec.encode_chat("\udcc3\udca9")) == "é".encode()


def test_a_chat_ends_where_the_answer_begins(chat):
    with pytest.raises(UserError, match="has no chat template: leave --chat out"):
        TokenizerOf(chat).encode_chat("two")
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    assert TokenizerOf(chat).encode_chat("two") == [0, 2, 5, 1, 3]
    with pytest.raises(UserError, match="takes a model with a chat template"):
        Bytes().encode_chat("a")


@pytest.mark.parametrize("prompt", [b"a\xff\xfe", b"a\xc3", "a\ufffd".encode()])
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_model_of_bytes_continues_any_bytes(capsys, monkeypatch, prompt, is_typed):
    model = Llama(small_config(vocab_size=256))
    found = build.Trained(model, {}, Bytes(), "no weights")
    monkeypatch.setattr(build, "load", lambda *_: found)

    def generator(*_, **__):
        return lambda *_: iter(b"\xa9b")

    monkeypatch.setattr(generate, "make_generator", generator)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prompt)))
    argv = ["--prompt", os.fsdecode(prompt)] if is_typed else []
    status, out, report = run(capsys, "folder", *argv)
    assert status == 0
    assert f"prompt: {len(prompt)} tokens" in report
    assert out == (prompt + b"\xa9b\n").decode(errors="replace")


def test_what_the_terminal_cannot_encode_is_replaced(monkeypatch):
    found = build.Trained(Llama(small_config(vocab_size=256)), {}, Bytes(), "")
    monkeypatch.setattr(build, "load", lambda *_: found)
    ids = "é😀b".encode()
    monkeypatch.setattr(
        generate, "make_generator", lambda *_, **__: lambda *_: iter(ids)
    )
    monkeypatch.setattr(train, "run", lambda *_: print("to ü\udcff"))
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert generate.main(["folder", "--prompt", "ä"]) == 0
    assert train.main(["--steps", "1"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == b"???b\nto ??\n"


def run(capsys, *argv):
    status = generate.main([str(arg) for arg in argv])
    return status, *capsys.readouterr()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_generates(chat, capsys, monkeypatch):
    greedy = ("--temperature", 0, "--tokens", 4)
    status, out, report = run(capsys, chat, "--prompt", "one two", *greedy)
    assert status == 0
    assert out.startswith("one two")
    assert "bfloat16 weights; compiled in" in report
    assert "prompt: 3 tokens" in report
    # The same tokens as without a cache.
    config, params = hf.load(chat)
    model, tokens = Llama(config), [0, 4, 5]
    apply = jax.jit(model.apply)
    for _ in range(4):
        logits = apply(
            {"params": params}, jnp.asarray([tokens + [0] * (8 - len(tokens))])
        )
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
        if tokens[-1] == 1:
            break
    # The words are separated by spaces, also after the prompt.
    assert out == f"{TokenizerOf(chat).decode(tokens)}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one two")))
    assert run(capsys, chat, *greedy)[1] == out


def test_what_cannot_generate_is_named(chat, tmp_path, capsys):
    prompt = ("--prompt", "one")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-Q8_0.gguf").touch()
    cases = [
        ((tmp_path / "missing", *prompt), "holds neither a run nor a model"),
        ((tmp_path / "gguf", *prompt), "gguf holds a GGUF file: give its path, "),
        ((FIXTURE / "llama", *prompt), "llama has no tokenizer, which"),
        ((chat, *prompt, "--weights", "codes"), "runs with weights in floats"),
        ((chat, *prompt, "--temperature", -1), "temperature takes a number from 0 to"),
        ((chat, *prompt, "--top-k", -1), "top_k takes an integer from 0 to 2147483647"),
        ((chat, *prompt, "--top-p", 0), "top_p takes a number from 1.17549e-38 to 1"),
        ((chat, *prompt, "--top-p", "nan"), "got nan"),
        ((chat, *prompt, "--seed", -1), "seed takes an integer from 0 to 4294967295"),
        ((chat, "--prompt", "one " * 600), "the prompt has 601 tokens; the model"),
        ((chat, *prompt, "--chat"), "has no chat template"),
    ]
    for argv, message in cases:
        status, _, error = run(capsys, *argv)
        assert (status, error.startswith("error: ")) == (1, True), argv
        assert message in error
    with pytest.raises(SystemExit):
        generate.main([str(chat), "--weights", "x"])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_generates_with_codes_and_with_floats(tmp_path, text, capsys):
    sizes = "--hidden 64 --ffn 128 --layers 1 --heads 2 --kv-heads 1 --seq 32 --batch 2"
    argv = f"--data {text} --steps 2 {sizes}".split()
    folder, bf16 = tmp_path / "run", tmp_path / "bf16"
    with jax.numpy_dtype_promotion("standard"):
        assert train.main([*argv, f"--out={folder}"]) == 0
        assert train.main([*argv, f"--out={bf16}", "--recipe=bf16"]) == 0
        capsys.readouterr()
        for weights, named in ("codes", "INT8 codes (fallback)"), ("floats", "bfloat"):
            asked = ("--prompt", "1 and", "--weights", weights)
            status, out, report = run(capsys, folder, *asked)
            assert status == 0, report
            assert out.startswith("1 and")
            assert report.startswith(named)
            assert "stopped at the model's longest sequence, 32 tokens" in report
    status, _, error = run(capsys, bf16, "--prompt", "1", "--weights", "codes")
    assert (status, "codes take an INT8 recipe" in error) == (1, True)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tuned_run_generates_without_the_model_it_started_from(
    chat, text, tmp_path, capsys
):
    source = shutil.copytree(chat, tmp_path / "source")
    argv = f"--from-hf {source} --data {text} --out {tmp_path / 'run'} --recipe bf16"
    argv += " --steps 1 --seq 32 --batch 2"
    with jax.numpy_dtype_promotion("standard"):
        assert train.main(argv.split()) == 0
        shutil.rmtree(source)
        moved = (tmp_path / "run").rename(tmp_path / "moved")
        greedy = ("--prompt", "one two", "--temperature", 0, "--tokens", 2)
        status, out, report = run(capsys, moved, *greedy)
    assert status == 0, report
    assert out.splitlines()[-1].startswith("one two")
