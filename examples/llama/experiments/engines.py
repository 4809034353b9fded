"""What serving engines compute otherwise: perplexity in their arithmetic.

    python -m examples.llama.experiments.engines

An exported model has the codes that it was trained with, but engines quantize its
activations in their own way. This trains the model of `make train`, exports it, and
computes its perplexity on held-out text with the products of each engine, emulated on
this machine. Only the projections of layers are emulated. The rest is computed in the
dtype of the engine: llama.cpp has floats of 32 bits between layers.
"""

import argparse
import dataclasses
import functools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from examples.llama import atomic, hf, metrics
from examples.llama.build import build
from examples.llama.config import Config
from examples.llama.data import batches
from examples.llama.hf.files import WEIGHTS
from examples.llama.model import Llama
from examples.llama.run_folder import has_run
from examples.llama.step import EVAL_BATCHES, PyTree
from examples.llama.training import last_state, train
from fbq_jax import freeze

RESULTS = Path(__file__).parents[1] / "results" / "engines-cpu.json"
# The modules whose products engines compute with codes, by the last name of their path.
_PROJECTIONS = ("dense", "out", "gate_up", "down")

Product = Callable[[jax.Array, jax.Array], jax.Array]


def sglang(x: jax.Array, w: jax.Array, *, truncate: bool) -> jax.Array:
    """The product of SGLang's ``blockwise_int8``.

    Args:
        x: Activations, bfloat16 [M, K], quantized in groups of 128 along K.
        w: Codes times scales, float32 [K, N].
        truncate: Whether codes of ``x`` are truncated toward zero, as the engine does;
            otherwise they are rounded to nearest.

    Returns:
        The product, summed in float32, in the dtype of ``x``.
    """
    groups = x.astype(jnp.float32).reshape(len(x), -1, 128)
    scales = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1, keepdims=True), 1e-10) / 127
    codes = groups / scales
    codes = jnp.trunc(codes) if truncate else jnp.round(codes)
    return _matmul((codes * scales).reshape(x.shape), w).astype(x.dtype)


def w8a16(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of engines that load ``compressed-tensors`` with W8A16.

    Args:
        x: Activations, bfloat16 [M, K].
        w: Codes times scales in bfloat16, float32 [K, N], rounded to bfloat16.

    Returns:
        The product, summed in float32, in the dtype of ``x``.
    """
    w = w.astype(x.dtype).astype(jnp.float32)
    return _matmul(x.astype(jnp.float32), w).astype(x.dtype)


def llama_cpp(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of llama.cpp's ``Q8_0`` with activations in ``Q8_0``.

    Args:
        x: Activations, float32 [M, K], quantized in blocks of 32 along K, with scales
            that are rounded to float16 after codes are computed.
        w: Codes times scales in float16, float32 [K, N].

    Returns:
        The product, float32.
    """
    blocks = x.reshape(len(x), -1, 32)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    codes = jnp.round(blocks / jnp.where(scales > 0, scales, 1.0))
    scales = scales.astype(jnp.float16).astype(jnp.float32)
    return _matmul((codes * scales).reshape(x.shape), w)


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, precision="highest")


def emulate(product: Product) -> Any:
    """Returns a context in which the projections of a `Llama` are such products."""

    def intercept(
        call: Callable[..., Any], args: Any, kwargs: Any, context: Any
    ) -> Any:
        module = context.module
        if context.method_name != "__call__" or module.name not in _PROJECTIONS:
            return call(*args, **kwargs)
        (x,) = args
        # In float32: the module would cast codes times scales to its own dtype.
        kernel = module.get_variable("params", "kernel")
        kernel = kernel.reshape(x.shape[-1], -1)
        y = product(x.reshape(-1, x.shape[-1]), kernel)
        if module.has_variable("params", "bias"):
            y += module.get_variable("params", "bias").astype(y.dtype)[None]
        return y.reshape(*x.shape[:-1], -1)

    return nn.intercept_methods(intercept)


def log_probabilities(
    model: Llama,
    variables: PyTree,
    text: Iterable[np.ndarray],
    product: Product | None = None,
) -> np.ndarray:
    """Returns the logarithms of a model's predictions, float32 [B, S, V].

    Args:
        model: The model.
        variables: Its variables.
        text: Batches of tokens, int32 [b, S+1] each, which are joined.
        product: What the projections compute in place of their own products.
    """

    @jax.jit
    def predict(variables: PyTree, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(variables, tokens)
        return jax.nn.log_softmax(logits)

    with nullcontext() if product is None else emulate(product):
        found = [predict(variables, jnp.asarray(batch[:, :-1])) for batch in text]
    return np.concatenate(found)


def perplexity(predicted: np.ndarray, text: Sequence[np.ndarray]) -> float:
    """Returns the perplexity of the result of `log_probabilities`."""
    targets = np.concatenate(text)[:, 1:, None]
    found = np.take_along_axis(predicted, targets, -1)
    return math.exp(-found.mean(dtype=np.float64))


def divergence(reference: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the mean Kullback-Leibler divergence from a reference, in nats."""
    terms = np.exp(reference) * (reference - predicted)
    return float(terms.sum(-1, dtype=np.float64).mean())


def measure(run: Path, config: Config) -> dict[str, dict[str, float]]:
    """Returns what is measured of a finished run, by arithmetic."""
    model, _, corpus = build(config)
    data = batches(corpus, "val", seq=config.seq, batch=config.batch, seed=0)
    text = [data[i] for i in range(EVAL_BATCHES)]
    state = last_state(config, run)
    tokens = jax.ShapeDtypeStruct((1, config.seq), jnp.int32)
    frozen = freeze(model, state.variables(), tokens)
    # Engines have norms and gates of their own.
    plain = dataclasses.replace(model.config, saved_bits=None, remat="none")
    sixteen = Llama(plain)
    thirty_two = Llama(dataclasses.replace(plain, dtype=jnp.float32))
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            name: Path(scratch) / name
            for name in ("blockwise_int8", "compressed-tensors")
        }
        for name, folder in folders.items():
            hf.export(folder, name, model, frozen)
        blockwise, packed = (
            {"params": hf.load(folder)[1]} for folder in folders.values()
        )
        q8_0 = {"params": _with_float16_scales(folders["blockwise_int8"])}
    rounding = functools.partial(sglang, truncate=False)
    truncating = functools.partial(sglang, truncate=True)
    arithmetics: dict[str, tuple[Llama, PyTree, Product | None]] = {
        "bf16": (sixteen, {"params": state.params}, None),
        "freeze": (model, frozen, None),
        "SGLang": (sixteen, blockwise, truncating),
        "SGLang, if it rounded": (sixteen, blockwise, rounding),
        "compressed-tensors, W8A16": (sixteen, packed, w8a16),
        "llama.cpp, Q8_0": (thirty_two, q8_0, llama_cpp),
    }
    found: dict[str, dict[str, float]] = {}
    references: dict[str, np.ndarray] = {}
    for name, arithmetic in arithmetics.items():
        predicted = log_probabilities(*arithmetic[:2], text, arithmetic[2])
        if name in ("bf16", "freeze"):
            references[name] = predicted
        found[name] = {"perplexity": perplexity(predicted, text)} | {
            f"divergence from {reference}": divergence(expected, predicted)
            for reference, expected in references.items()
            if reference != name
        }
    return found


def _with_float16_scales(folder: Path) -> PyTree:
    """The parameters of an export in ``blockwise_int8`` with the scales of ``Q8_0``."""
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            tensors[name] = tensor.astype(np.float16).astype(np.float32)
    rounded = folder.with_name("rounded")
    shutil.copytree(folder, rounded)
    safetensors.numpy.save_file(tensors, rounded / WEIGHTS, {"format": "pt"})
    return hf.load(rounded)[1]


def describe(config: Config, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns the content of the results file."""
    return {
        **metrics.machine(),
        "options": dataclasses.asdict(config),
        "tokens": EVAL_BATCHES * config.batch * config.seq,
        "arithmetics": found,
    }


def markdown(results: dict[str, Any]) -> str:
    """Returns the results as a table, with divergences in thousandths of a nat."""
    arithmetics = results["arithmetics"]
    bf16 = arithmetics["bf16"]["perplexity"]
    lines = [
        "| arithmetic | perplexity | vs bf16 | divergence from bf16 | from `freeze` |",
        "|" + " --- |" * 5,
    ]
    for name, row in arithmetics.items():
        cells = [f"{row['perplexity']:.4f}", f"{row['perplexity'] / bf16 - 1:+.3%}"]
        for reference in ("bf16", "freeze"):
            value = row.get(f"divergence from {reference}")
            cells.append("" if value is None else f"{1000 * value:.3f}")
        shown = f"`{name}`" if name == "freeze" else name
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.experiments.engines",
        description="Computes an exported model's perplexity as engines would.",
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("runs/engines"),
        help="folder of the training run, which continues (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="file to write (default: %(default)s)",
    )
    asked = parser.parse_args(argv)
    config = Config()
    train(config, asked.run, resume=has_run(asked.run))
    results = describe(config, measure(asked.run, config))
    atomic.write(asked.results, json.dumps(results, indent=2) + "\n")
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
