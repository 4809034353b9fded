"""Continues a text with a trained model.

    python -m examples.llama.generate runs/fallback --prompt "def "

The folder is that of a run, which runs with the INT8 codes of its weights, or of a
checkpoint in Hugging Face's format, or a GGUF file. `--help` lists the options.
"""

# ruff: noqa: RUF009  (the defaults of options are constants)

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from examples.llama import build, fields
from examples.llama.errors import UserError, exit_status, replace_unprintable
from examples.llama.fields import option
from examples.llama.model import KVCache, Llama, empty_cache
from examples.llama.text import Codec, to_bytes

# What bytes that are no character are decoded as.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Each field is a flag of the command line."""

    tokens: fields.Size = option(200, "most tokens to generate")
    temperature: fields.FromZero = option(
        0.8, "logits are divided by it; 0 takes the most likely token"
    )
    top_k: fields.Natural = option(
        0, "draw from so many of the most likely tokens; 0 from all"
    )
    top_p: Annotated[float, fields.Range(float, fields.SMALLEST, 1)] = option(
        1.0, "draw from the most likely ones of this total probability"
    )
    seed: fields.Seed = option(0, "seed")

    def __post_init__(self) -> None:
        fields.check(self)


def sample(logits: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """Draws a token, int32 [B], for each sequence from logits, float32 [B, V]."""
    if how.temperature < fields.SMALLEST:  # float32 has no such divisor
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    order = jnp.argsort(-logits, axis=-1)
    sorted_logits = jnp.take_along_axis(logits, order, axis=-1)
    # The differences may become infinite, but not the largest of them, which is 0.
    sorted_logits = (sorted_logits - sorted_logits[:, :1]) / how.temperature
    probabilities = jax.nn.softmax(sorted_logits)
    # The most likely token stays, whatever top_p is.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = before < how.top_p
    if how.top_k:
        kept &= (jnp.arange(logits.shape[-1]) < how.top_k)[None]
    drawn = jax.random.categorical(key, jnp.where(kept, sorted_logits, -jnp.inf))
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


def make_generator(
    model: Llama, variables: dict[str, Any], how: Sampling, length: int
) -> Callable[[Sequence[int]], Iterator[int]]:
    """Returns a function that yields the tokens that follow a prompt of this length.

    It compiles two programs: one reads the prompt, the other one token. Prompts are not
    padded, because padding would share the scales of quantized activations with them.
    """
    variables = jax.device_put(variables)
    empty = empty_cache(model.config, 1, length + how.tokens)
    read, step = (
        draw.lower(model, how, variables, shape, empty, jax.random.key(0)).compile()
        for shape in (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (length, 1))
    )

    def generate(prompt: Sequence[int]) -> Iterator[int]:
        text, key = jnp.asarray([prompt], jnp.int32), jax.random.key(how.seed)
        cache = jax.tree.map(jnp.copy, empty)  # a step donates it
        drawn, cache = read(variables, text, cache, key)
        for _ in range(how.tokens - 1):
            yield int(drawn[0, 0])
            drawn, cache = step(variables, drawn, cache, key)
        yield int(drawn[0, 0])

    return generate


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def draw(
    model: Llama,
    how: Sampling,
    variables: dict[str, Any],
    tokens: jax.Array,
    cache: KVCache,
    key: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Reads tokens, int32 [1, S], and draws the next one, int32 [1, 1]."""
    found: Any = model.apply(variables, tokens, cache)
    logits, cache = found
    drawn = sample(logits[:, -1], jax.random.fold_in(key, cache.length), how)
    return drawn[:, None], cache


def write(asked: argparse.Namespace) -> None:
    """Generates what the command line asks for and prints it."""
    how = Sampling(**fields.given(asked, Sampling))
    text = asked.prompt
    if text is None:  # as Python decodes the command line
        text = sys.stdin.buffer.read().decode(errors="surrogateescape")
    found = build.load(asked.folder, asked.weights)
    prompt = (found.codec.encode_chat if asked.chat else found.codec.encode)(text)
    config, length = found.model.config, len(prompt)
    longest, vocab_size = config.max_seq_len, config.vocab_size
    if not prompt:
        raise UserError("the prompt is empty: give --prompt a text")
    if length >= longest:
        raise UserError(f"the prompt has {length} tokens; the model takes {longest}")
    if (last := max(prompt)) >= vocab_size:
        raise UserError(
            f"the tokenizer gives the prompt a token {last} of {vocab_size}"
        )
    fitting = min(how.tokens, longest - length)
    times = [time.perf_counter()]
    how_many = dataclasses.replace(how, tokens=fitting)
    generator = make_generator(found.model, found.variables, how_many, length)
    times.append(time.perf_counter())
    if not asked.chat:
        text = to_bytes(text).decode(errors="replace").rstrip(_INCOMPLETE)
        print(text, end="", flush=True)
    drawn = _print(found.codec, prompt, generator(prompt), times)
    started, compiled, read, *_ = times
    speed = f"{found.weights}; compiled in {compiled - started:.1f} s; prompt: "
    speed += f"{length} tokens, {length / (read - compiled):,.1f} tokens/s"
    if (steps := len(times) - 3) > 0:
        speed += f"; then {steps} tokens, {steps / (times[-1] - read):,.1f} tokens/s"
    print(speed, file=sys.stderr)
    if drawn == fitting < how.tokens:
        what = f"the model's longest sequence, {longest} tokens"
        print(f"stopped at {what}", file=sys.stderr)


def _print(
    codec: Codec, prompt: list[int], tokens: Iterator[int], times: list[float]
) -> int:
    """Prints tokens up to one that stops, adds their times and returns their number."""
    # Some tokenizers decode the first token without its space, so all are decoded.
    text, shown = list(prompt), codec.decode(prompt).rstrip(_INCOMPLETE)

    def show(decoded: str) -> None:
        nonlocal shown
        if decoded.startswith(shown):  # a later token may complete a character
            print(decoded[len(shown) :], end="", flush=True)
            shown = decoded

    for token in tokens:
        times.append(time.perf_counter())
        if token in codec.stops:
            break
        text.append(token)
        # The first bytes of a character are not shown before the others.
        show(codec.decode(text).rstrip(_INCOMPLETE))
    show(codec.decode(text))
    print()
    return len(text) - len(prompt)


def _parser() -> argparse.ArgumentParser:
    prog, text = "python -m examples.llama.generate", "Continues a text with a model."
    parser = argparse.ArgumentParser(prog, description=text)
    add = parser.add_argument
    text = "folder of a run of examples.llama.train, or of a Hugging Face model, such "
    text += "as the exports blockwise_int8 and compressed-tensors; or a GGUF file"
    add("folder", type=Path, help=text)
    add("--prompt", help="text to continue (default: standard input)")
    text = "take the prompt as a user's message, in the model's chat template"
    add("--chat", action="store_true", help=text)
    fields.add_options(parser, Sampling)
    text = "what projections multiply by (default: the INT8 codes of a run with an "
    text += "INT8 recipe, which fbq_jax.freeze makes; else floats)"
    add("--weights", choices=build.WEIGHTS, help=text)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    asked = _parser().parse_args(argv)
    replace_unprintable()
    return exit_status(lambda: write(asked))


if __name__ == "__main__":
    sys.exit(main())
