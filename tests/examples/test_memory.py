"""The memory that a layer of the Llama saves for the backward pass.

The layers run in ``nn.scan``, so saved arrays are stacked, and are buffers of the
program.  The tests count the saved arrays that grow with the number of tokens, from
the shapes of the traced program.  One test compares the count with XLA's analysis of
compiled programs that return these arrays.  No program runs.

A stand-in for the attention core saves what cuDNN's flash attention saves, whatever the
device: q, k, v, the output and a float32 statistic per row.  XLA's attention would also
save the probabilities.
"""

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from examples.llama import attention
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from fbq_jax import fallback_dot
from fbq_jax.bench import results
from tests.marks import rows_with_first_fast, with_first_fast

ROOT = Path(__file__).parents[2]

HIDDEN, MLP, LAYERS, SEQ = 512, 1792, 3, 128
ATTENTION = {HIDDEN: 2, HIDDEN // 4: 2}  # q and output; k and v

ROWS = LAYERS * 2 * SEQ  # of two sequences, in all layers

# Recipe, saved bits, remat.
Variant = tuple[str, int | None, str]


class Saved(NamedTuple):
    """The arrays that a layer saves.

    Attributes:
      bytes_per_token: their size.
      widths: their number by dtype and by width in values per token.
      lower: lowers the program that returns the arrays of all layers.
    """

    bytes_per_token: float
    widths: dict[str, Counter]
    lower: Callable[[], Any]


@jax.custom_vjp
def flash(q, k, v):
    return flash_fwd(q, k, v)[0]


def flash_fwd(q, k, v):
    with jax.numpy_dtype_promotion("standard"):
        out, statistic = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, return_residual=True
        )
    # Flat, as the projection reads it, so that both save the same bfloat16 array.
    out = out.reshape(*q.shape[:2], -1)
    return out, (q, k, v, out, statistic.astype(jnp.float32))


def flash_bwd(saved, dy):
    """Returns no gradient, but reads everything that the gradient needs."""
    q, k, v, out, statistic = saved
    total = jnp.sum((out + dy).astype(jnp.float32)) + jnp.sum(statistic)
    return jax.tree.map(lambda x: x * total.astype(x.dtype), (q, k, v))


flash.defvjp(flash_fwd, flash_bwd)


@functools.cache
def measure(variant):
    recipe, saved_bits, remat = variant
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_layers=LAYERS,
        num_heads=8,
        num_kv_heads=2,
        saved_bits=saved_bits,
        remat=remat,
    )
    model = Llama(config, fallback_dot if recipe == "fallback" else None)
    one = jnp.zeros((1, 1), jnp.int32)
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), one))
    params = variables.pop("params")

    def residuals(params, state, tokens):
        def apply(params):
            return model.apply({"params": params, **state}, tokens, mutable="fallback")

        _, backward, _ = jax.vjp(apply, params, has_aux=True)
        leaves = jax.tree.leaves(backward)
        return list({id(leaf): leaf for leaf in leaves}.values())

    operands, few = trace_residuals(residuals, params, variables, 2)
    _, many = trace_residuals(residuals, params, variables, 4)
    counted = [
        i
        for i, (a, b) in enumerate(zip(few, many, strict=True))
        if a.shape != b.shape and a.shape[0] == LAYERS
    ]

    def lower():
        select = operator.itemgetter(*counted)
        return jax.jit(lambda *args: select(residuals(*args))).lower(*operands)

    widths = {}
    for array in (few[i] for i in counted):
        widths.setdefault(array.dtype.name, Counter())[array.size / ROWS] += 1
    nbytes = sum(few[i].size * few[i].dtype.itemsize for i in counted)
    return Saved(nbytes / ROWS, widths, lower)


def trace_residuals(function, params, state, sequences):
    """Returns the operands of the function, and the shapes of its results."""
    tokens = jax.ShapeDtypeStruct((sequences, SEQ), jnp.int32)
    operands = params, state, tokens
    return operands, jax.eval_shape(function, *operands)


@pytest.fixture(autouse=True)
def flash_everywhere(monkeypatch):
    monkeypatch.setattr(attention, "attend", lambda q, k, v, **_: flash(q, k, v))


def wide_floats(saved):
    """Counts float arrays except scales and statistics, with few values per token."""
    floats = sum(
        (saved.widths.get(f, Counter()) for f in ("float32", "bfloat16")), Counter()
    )
    return Counter({width: n for width, n in floats.items() if width > 32})


BF16 = ("bf16", None, "none")
SAVING = ("fallback", 10, "none")


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", [BF16, SAVING])
def test_the_compiler_counts_the_same_bytes(variant):
    saved = measure(variant)
    analysis = saved.lower().compile().memory_analysis()
    arrays = sum(counter.total() for counter in saved.widths.values())
    pointers = 8 * arrays  # of the tuple
    nbytes = analysis.output_size_in_bytes - pointers
    assert nbytes / ROWS == saved.bytes_per_token


CODES = {HIDDEN / 4: 3, MLP / 4: 1}  # X of each projection, four codes in a word
# Two norms and the two factors of the gate, in 10 bits: words of 32.
PACKED = {HIDDEN * 10 / 32: 2, 2 * MLP * 10 / 32: 1}


@pytest.mark.parametrize(
    ("variant", "codes", "packed", "floats"),
    rows_with_first_fast(
        [
            (SAVING, CODES, PACKED, ATTENTION),
            (("fallback", None, "codes"), CODES, {}, {HIDDEN: 1}),
            (("bf16", 10, "full"), {}, {}, {HIDDEN: 1}),
            (("fallback", 10, "codes"), CODES, PACKED, {HIDDEN: 1}),
            (("fallback", 10, "full"), {}, {}, {HIDDEN: 1}),
        ],
        3,
    ),
)
def test_a_layer_saves_codes_and_few_floats(variant, codes, packed, floats):
    """The floats are those of attention, or the input of a layer with remat."""
    saved = measure(variant)
    assert saved.widths.get("int32", {}) == codes
    assert saved.widths.get("uint32", {}) == packed
    assert wide_floats(saved) == floats
    bytes_of = ((codes, 4), (packed, 4), (floats, 2))
    expected = sum(size * width * n for of, size in bytes_of for width, n in of.items())
    assert expected <= saved.bytes_per_token < 1.03 * expected


def table_of_the_page():
    """The bytes and the milliseconds in the table, by variant."""
    text = (ROOT / "docs/guides/train-a-llama.md").read_text()
    rows = re.findall(
        r"^\| (bf16|fallback) \| (\d+) \| `(\w+)` \| ([\d.]+) \| ([\d.]*) ?\|",
        text,
        re.MULTILINE,
    )
    return {
        (recipe, int(bits) or None, remat): (float(nbytes), ms)
        for recipe, bits, remat, nbytes, ms in rows
    }


TABLE = table_of_the_page()


def test_the_table_of_the_page_has_the_measured_times():
    sections = results.load(ROOT / "fbq_jax/bench/results/nvidia-h200.json")
    shape, rows = (4096, 14336, 16384), sections["block"]["rows"]
    measured = {row.what: f"{row.ms:.1f}" for row in rows if row.shape == shape}
    assert {variant: ms for variant, (_, ms) in TABLE.items() if ms} == {
        BF16: measured["bf16"],
        SAVING: measured["fallback"],
        ("fallback", 10, "codes"): measured["fallback, remat codes"],
        ("bf16", None, "full"): measured["bf16, remat full"],
        ("fallback", 10, "full"): measured["fallback, remat full"],
    }


@pytest.mark.parametrize("variant", with_first_fast(TABLE, 3), ids=str)
def test_the_table_of_the_page(variant):
    """The tolerance for autodiff allows for other versions of Flax and JAX."""
    bytes_per_channel, _ = TABLE[variant]
    saved = measure(variant).bytes_per_token / HIDDEN
    autodiff = variant[1] is None and variant[2] == "none"
    assert saved == pytest.approx(bytes_per_channel, abs=5.0 if autodiff else 0.1)


@pytest.mark.gpu
def test_the_stand_in_saves_what_flash_attention_saves(monkeypatch):
    monkeypatch.undo()
    q = jnp.ones((2, SEQ, 8, 64), jnp.bfloat16)
    k = jnp.ones((2, SEQ, 2, 64), jnp.bfloat16)
    assert attention.choose(q.dtype, SEQ, 64)[0] == "cudnn"
    sizes = [
        sorted((x.dtype.name, x.size) for x in jax.tree.leaves(saved) if x.size)
        for saved in (jax.vjp(attention.attend, q, k, k)[1], jax.vjp(flash, q, k, k)[1])
    ]
    assert sizes[0] == sizes[1]
