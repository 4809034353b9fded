"""Continues a text with a trained model.

    python -m examples.llama.generate runs/fallback --prompt "def "

The folder is that of a run, which runs with the INT8 codes of its weights, or of a
checkpoint in Hugging Face's format. `--help` lists the options.
"""

import argparse
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.llama import checkpoint, hf, trained
from examples.llama.config import ConfigError
from examples.llama.data import DataError
from examples.llama.kv_cache import KVCache, empty_cache
from examples.llama.model import Llama
from examples.llama.run_folder import RunError
from examples.llama.sampling import Sampling, sample
from examples.llama.text import ChatError, to_bytes

ERRORS = (
    ChatError,
    ConfigError,
    DataError,
    RunError,
    checkpoint.RestoreError,
    hf.CheckpointError,
)


# What bytes that are no character are decoded as.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Generator:
    """Continues prompts of one length.

    It compiles two programs: one reads the prompt, the other one token. Prompts are not
    padded, because padding would share the scales of quantized activations with them.
    """

    def __init__(
        self,
        model: Llama,
        variables: dict[str, Any],
        how: Sampling,
        *,
        prompt: int,
        tokens: int,
    ):
        """Compiles the programs.

        Args:
            model: The model.
            variables: Its variables.
            how: How tokens are drawn.
            prompt: The tokens of a prompt.
            tokens: The most tokens to generate.
        """
        self._tokens = tokens
        self._variables = jax.device_put(variables)
        text, seed = jax.ShapeDtypeStruct((1, prompt), jnp.int32), jnp.uint32(0)
        read = _read.lower(model, how, prompt + tokens, self._variables, text, seed)
        step = _step.lower(model, how, self._variables, *read.out_info)
        self._read, self._step = read.compile(), step.compile()

    def __call__(self, prompt: Sequence[int], seed: int) -> Iterator[int]:
        """Yields the tokens that follow a prompt."""
        text = jnp.asarray([prompt], jnp.int32)
        state = self._read(self._variables, text, jnp.uint32(seed))
        for _ in range(self._tokens - 1):
            yield int(state[0][0])
            state = self._step(self._variables, *state)
        yield int(state[0][0])


State = tuple[jax.Array, KVCache, jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    model: Llama,
    how: Sampling,
    size: int,
    variables: dict[str, Any],
    tokens: jax.Array,
    seed: jax.Array,
) -> State:
    """Reads a prompt, int32 [1, S], and draws the next token, int32 [1].

    Returns:
        The token, a cache for ``size`` tokens with those read, and the key.
    """
    cache = empty_cache(model.config, 1, size)
    return _draw(model, how, variables, tokens, cache, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _step(
    model: Llama,
    how: Sampling,
    variables: dict[str, Any],
    drawn: jax.Array,
    cache: KVCache,
    key: jax.Array,
) -> State:
    """Reads the token that was drawn and draws the next one."""
    return _draw(model, how, variables, drawn[:, None], cache, key)


def _draw(
    model: Llama,
    how: Sampling,
    variables: dict[str, Any],
    tokens: jax.Array,
    cache: KVCache,
    key: jax.Array,
) -> State:
    found: Any = model.apply(variables, tokens, cache)
    logits, cache = found
    drawn = sample(logits[:, -1], jax.random.fold_in(key, cache.length), how)
    return drawn, cache, key


def write(asked: argparse.Namespace) -> None:
    """Generates what the command line asks for and prints it."""
    how = _sampling(asked)
    text = asked.prompt
    if text is None:  # as Python decodes the command line
        text = sys.stdin.buffer.read().decode(errors="surrogateescape")
    found = trained.load(asked.folder, asked.weights)
    encode = found.codec.encode_chat if asked.chat else found.codec.encode
    prompt = encode(text)
    config = found.model.config
    _check_prompt(prompt, config.vocab_size, config.max_seq_len)
    tokens = min(asked.tokens, config.max_seq_len - len(prompt))
    started = time.perf_counter()
    generator = Generator(
        found.model, found.variables, how, prompt=len(prompt), tokens=tokens
    )
    compiled = time.perf_counter()
    times = [compiled]
    drawn: list[int] = []
    # Some tokenizers decode the first token without its space.
    shown = found.codec.decode(prompt).rstrip(_INCOMPLETE)
    if not asked.chat:
        text = to_bytes(text).decode(errors="replace").rstrip(_INCOMPLETE)
        print(text, end="", flush=True)
    for token in _until_stop(generator(prompt, asked.seed), found.codec.stops, times):
        drawn.append(token)
        # The first bytes of a character are not shown before the others.
        shown = _show(found.codec.decode([*prompt, *drawn]).rstrip(_INCOMPLETE), shown)
    _show(found.codec.decode([*prompt, *drawn]), shown)
    print()
    _report(found.weights, compiled - started, len(prompt), times)
    if len(drawn) == tokens < asked.tokens:
        print(
            f"stopped at the model's longest sequence, {config.max_seq_len} tokens",
            file=sys.stderr,
        )


def _until_stop(
    tokens: Iterator[int], stops: frozenset[int], times: list[float]
) -> Iterator[int]:
    """Yields the tokens before a stop token, and adds when each was drawn."""
    for token in tokens:
        times.append(time.perf_counter())
        if token in stops:
            return
        yield token


def _show(text: str, shown: str) -> str:
    """Prints what follows the text that is shown; returns the text that then is."""
    if not text.startswith(shown):  # a later token may complete a character
        return shown
    print(text[len(shown) :], end="", flush=True)
    return text


def _report(weights: str, compiling: float, prompt: int, times: list[float]) -> None:
    reading, generating = times[1] - times[0], times[-1] - times[1]
    speed = f"{weights}; compiled in {compiling:.1f} s; "
    speed += f"prompt: {prompt} tokens, {prompt / reading:,.1f} tokens/s"
    if (steps := len(times) - 2) > 0:
        speed += f"; then {steps} tokens, {steps / generating:,.1f} tokens/s"
    print(speed, file=sys.stderr)


def _sampling(asked: argparse.Namespace) -> Sampling:
    if not 0 <= asked.seed < 2**32:
        raise ConfigError(f"seed takes an integer of 32 bits, got {asked.seed}")
    try:
        return Sampling(
            temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_prompt(prompt: list[int], vocab_size: int, longest: int) -> None:
    if not prompt:
        raise ConfigError("the prompt is empty: give --prompt a text")
    if len(prompt) >= longest:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens; the model takes sequences of "
            f"{longest}, and generates at least one"
        )
    if max(prompt) >= vocab_size:
        raise ConfigError(
            f"the tokenizer gives the prompt a token {max(prompt)}, the model has "
            f"{vocab_size} tokens"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.generate",
        description="Continues a text with a trained model.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="folder of a run of examples.llama.train, or of a Hugging Face model; "
        "the exports blockwise_int8 and compressed-tensors are such models",
    )
    parser.add_argument("--prompt", help="text to continue (default: standard input)")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="take the prompt as a user's message, in the model's chat template",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=200,
        help="most tokens to generate (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        help="0 takes the most likely token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=Sampling.top_k,
        help="draw from so many of the most likely tokens; 0 from all (default: 0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=Sampling.top_p,
        help="draw from the most likely tokens that have this probability together "
        "(default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument(
        "--weights",
        choices=trained.WEIGHTS,
        help="what projections multiply by (default: the INT8 codes of a run with an "
        "INT8 recipe, which fbq_jax.freeze makes; else floats)",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"takes a positive integer, got {text}")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    asked = _parser().parse_args(argv)
    try:
        write(asked)
    except KeyboardInterrupt:
        return 130
    except (*ERRORS, OSError) as error:  # OSError names its file
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
