"""What a layer of the Llama keeps for the backward pass, as the compiler counts it.

The layers run in ``nn.scan``, so what is kept is stacked: buffers that a program really
has.  Counted are those that grow with the number of tokens, by XLA's analysis of the
program that returns them.  Nothing is run.

Attention's core is a stand-in that keeps what cuDNN's flash attention does, whatever
the device: q, k, v, the output and a float32 statistic a row.  XLA's own would add the
probabilities.
"""

import functools
import operator
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from examples.llama import attention
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from fbq_jax import fallback_dot

HIDDEN, MLP, LAYERS, SEQ = 512, 1792, 3, 128
ATTENTION = {HIDDEN: 2, HIDDEN // 4: 2}  # q and the output; k and v

# Programs that were compiled are measured again: by one process of a parallel run.
pytestmark = pytest.mark.xdist_group("memory")

# Recipe, saved bits, remat.
Variant = tuple[str, int | None, str]


class Kept(NamedTuple):
    """Of one layer: bytes a token, and arrays by dtype and width (values a token)."""

    bytes_a_token: float
    widths: dict[str, Counter]


@jax.custom_vjp
def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash_fwd(q, k, v)[0]


def flash_fwd(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        out, statistic = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, return_residual=True
        )
    # Flat, as the projection takes it: in bfloat16 that keeps the same array.
    out = out.reshape(*q.shape[:2], -1)
    return out, (q, k, v, out, statistic.astype(jnp.float32))


def flash_bwd(kept: Any, dy: jax.Array) -> Any:
    """Not the gradient, but it reads all that the gradient does."""
    q, k, v, out, statistic = kept
    total = jnp.sum((out + dy).astype(jnp.float32)) + jnp.sum(statistic)
    return jax.tree.map(lambda x: x * total.astype(x.dtype), (q, k, v))


flash.defvjp(flash_fwd, flash_bwd)


@functools.cache
def measure(variant: Variant) -> Kept:
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

    def keep(params: Any, state: Any, tokens: jax.Array) -> list[jax.Array]:
        def apply(params: Any) -> Any:
            return model.apply({"params": params, **state}, tokens, mutable="fallback")

        _, backward, _ = jax.vjp(apply, params, has_aux=True)
        leaves = jax.tree.leaves(backward)
        return list({id(leaf): leaf for leaf in leaves}.values())

    def of_layers(sequences: int) -> Any:
        tokens = jax.ShapeDtypeStruct((sequences, SEQ), jnp.int32)
        return (params, variables, tokens), jax.eval_shape(
            keep, params, variables, tokens
        )

    operands, few = of_layers(2)
    _, many = of_layers(4)
    counted = [
        i
        for i, (a, b) in enumerate(zip(few, many, strict=True))
        if a.shape != b.shape and a.shape[0] == LAYERS
    ]
    program = jax.jit(lambda *operands: operator.itemgetter(*counted)(keep(*operands)))
    analysis = program.lower(*operands).compile().memory_analysis()
    pointers = 8 * len(counted) if len(counted) > 1 else 0  # of a tuple
    rows = LAYERS * 2 * SEQ
    widths: dict[str, Counter] = {}
    for array in (few[i] for i in counted):
        widths.setdefault(array.dtype.name, Counter())[array.size / rows] += 1
    return Kept((analysis.output_size_in_bytes - pointers) / rows, widths)


@pytest.fixture(autouse=True)
def flash_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", flash)


def wide_floats(kept: Kept) -> Counter:
    """Not scales and statistics, of which there are few a token."""
    floats = sum(
        (kept.widths.get(f, Counter()) for f in ("float32", "bfloat16")), Counter()
    )
    return Counter({width: n for width, n in floats.items() if width > 16})


BF16: Variant = ("bf16", None, "none")
SAVING: Variant = ("fallback", 10, "none")


def test_int8_and_int10_save_more_than_38_percent_of_bf16() -> None:
    bf16, saving = measure(BF16).bytes_a_token, measure(SAVING).bytes_a_token
    assert saving < (1 - 0.38) * bf16
    # Autodiff keeps float32 copies in the norms and each factor of the gate. The least
    # that bf16 could keep: what norms, projections, attention and gate are given.
    norms, projections = 2 * HIDDEN, 3 * HIDDEN + MLP
    least = 2 * (norms + projections + 1.5 * HIDDEN + 2 * MLP)
    assert least < bf16
    assert saving < (1 - 0.3) * least


def test_no_float_is_kept_beside_the_codes() -> None:
    kept = measure(SAVING)
    assert kept.widths["int8"] == {HIDDEN: 3, MLP: 1}  # X of each projection
    # Two norms and the gate's two factors, in 8 + 2 bits.
    assert kept.widths["uint8"] == {HIDDEN: 2, HIDDEN / 4: 2, MLP: 2, MLP / 4: 2}
    assert wide_floats(kept) == ATTENTION
    codes = 3 * HIDDEN + MLP + (2 * HIDDEN + 2 * MLP) * 10 / 8
    floats = 2 * 2.5 * HIDDEN
    assert codes + floats < kept.bytes_a_token < 1.03 * (codes + floats)


@pytest.mark.parametrize("saved_bits", [None, 10])
def test_remat_keeps_codes_and_the_input_of_the_layer(saved_bits: int | None) -> None:
    kept = measure(("fallback", saved_bits, "codes"))
    assert kept.widths["int8"] == measure(SAVING).widths["int8"]
    packed = measure(SAVING).widths["uint8"] if saved_bits else None
    assert kept.widths.get("uint8") == packed
    assert wide_floats(kept) == {HIDDEN: 1}
    assert kept.bytes_a_token < measure(SAVING).bytes_a_token


@pytest.mark.parametrize("recipe", ["bf16", "fallback"])
def test_full_remat_keeps_the_input_of_the_layer(recipe: str) -> None:
    kept = measure((recipe, 10, "full"))
    assert kept.bytes_a_token == 2 * HIDDEN
    assert kept.widths == {"bfloat16": {HIDDEN: 1}}


@pytest.mark.parametrize(
    ("variant", "bytes_a_channel"),
    [
        (BF16, 75.1),
        (("fallback", None, "none"), 70.6),
        (("bf16", 10, "none"), 27.6),
        (SAVING, 23.1),
        (("fallback", 10, "codes"), 20.0),
        (("fallback", None, "codes"), 8.5),
        (("fallback", 10, "full"), 2.0),
    ],
)
def test_the_table_of_the_readme(variant: Variant, bytes_a_channel: float) -> None:
    """What autodiff keeps of Flax's layers is up to the versions of Flax and JAX."""
    kept = measure(variant).bytes_a_token / HIDDEN
    autodiff = variant[1] is None and variant[2] == "none"
    assert kept == pytest.approx(bytes_a_channel, abs=5.0 if autodiff else 0.1)


@pytest.mark.gpu
def test_the_stand_in_keeps_what_flash_attention_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    q = jnp.ones((2, SEQ, 8, 64), jnp.bfloat16)
    k = jnp.ones((2, SEQ, 2, 64), jnp.bfloat16)
    assert attention.implementation(q.dtype, SEQ, 64) == "cudnn"
    sizes = [
        sorted((x.dtype.name, x.size) for x in jax.tree.leaves(kept) if x.size)
        for kept in (jax.vjp(attention.attend, q, k, k)[1], jax.vjp(flash, q, k, k)[1])
    ]
    assert sizes[0] == sizes[1]
