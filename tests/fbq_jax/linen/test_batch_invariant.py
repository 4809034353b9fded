"""A token's output depends on that token and W alone, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from fbq_jax import FallbackDot, dot_general, freeze, recipes
from fbq_jax.ops import dispatch
from fbq_jax.ops.dispatch import Request
from tests.marks import with_first_fast

# Where blocks of K have their own scales, sums must be ordered.
ORDERED = {
    name: dataclasses.replace(
        recipe,
        fwd=dataclasses.replace(recipe.fwd, ordered=recipe.fwd.splits_contraction),
    )
    for name, recipe in recipes.NAMED.items()
}
INVARIANT = [name for name, recipe in ORDERED.items() if recipe.batch_invariant]
OTHERS = [name for name in ORDERED if name not in INVARIANT]
TOKENS = 8192
# The last block of K is partial.  Kernels for GPUs may split a long K.
K, N = (4160, 304) if jax.default_backend() == "gpu" else (160, 48)
SCALE = 1.5  # of what follows a layer


class Model:
    """A layer with a bias, and its training variables and frozen variables."""

    def __init__(self, name: str, dtype: str, implementation: str | None):
        self.recipe = ORDERED[name]
        dot = FallbackDot(self.recipe, implementation=implementation)
        self.dense = nn.Dense(
            N, dot_general=dot, dtype=dtype, bias_init=nn.initializers.normal()
        )
        self.x = tokens(dtype)
        variables = jax.jit(self.dense.init)(jax.random.key(1), self.x)
        _, state = jax.jit(self.train)(variables, self.x)
        self.variables = variables | state
        self.frozen = freeze(self.dense, self.variables, self.x)

    def evaluate(self, x):
        return self.dense.apply(self.variables, x)

    def decode(self, x):
        return self.dense.apply(self.frozen, x)

    def decode_in_scan(self, x):
        """One token after the other."""
        return lax.scan(lambda _, token: (None, self.decode(token[None])), None, x)[1]

    def train(self, variables, x):
        return self.dense.apply(variables, x, mutable=["fallback"])

    def differentiate(self, x):
        """The output that a training step computes."""

        def loss(params):
            y, _ = self.train(self.variables | {"params": params}, x)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        grads, y = jax.grad(loss, has_aux=True)(self.variables["params"])
        return y, grads

    def decode_in_block(self, x):
        """Between a product and a norm, which XLA may fuse with the layer."""
        doubled = self.decode((x * jnp.asarray(0.5, x.dtype)) * 2)
        wide = (doubled * jnp.asarray(SCALE, x.dtype) + doubled).astype(jnp.float32)
        norm = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True))
        return doubled, norm

    def multiply(self, x):
        """The op itself, and the bias."""
        kernel, bias = (self.variables["params"][k] for k in ("kernel", "bias"))
        dims = ((x.ndim - 1,), (0,)), ((), ())
        y, _ = dot_general(
            *(x, kernel.astype(x.dtype), dims),
            recipe=self.recipe,
            preferred_element_type=x.dtype,
            implementation=self.dense.dot_general.implementation,
        )
        return y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)


def tokens(dtype):
    """Tokens of different magnitudes, each with an outlier."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, K)) * np.exp(rng.standard_normal((TOKENS, 1)))
    x[np.arange(TOKENS), rng.integers(K, size=TOKENS)] *= 30.0
    return jnp.asarray(x, dtype)


# Programs, the shapes of the tokens that each takes, and how often it runs.
PROGRAMS = [
    (Model.decode, (1,), 16),
    (Model.decode, (8, 1), 16),
    (Model.decode, (9,), 16),
    (Model.decode, (1, 4096), 1),
    (Model.decode_in_block, (2, 65), 4),
    (Model.decode_in_scan, (5,), 16),
    (Model.evaluate, (3,), 16),
    (Model.evaluate, (TOKENS,), 1),
    (Model.multiply, (2, 3), 16),
    (Model.differentiate, (4, 64), 2),
]
OFTEN = np.array([often for *_, often in PROGRAMS])


def changed_outputs(model: Model, cases: int) -> list[tuple[str, tuple[int, ...]]]:
    """The programs and shapes whose outputs differ from the whole batch's.

    Each case is a random program on random tokens at random positions, beside others
    and beside padding.  The first cases run the first programs without ``jit``.
    """
    rng = np.random.default_rng(1)
    x, bits = np.asarray(model.x), bits_of(jax.jit(model.differentiate)(model.x)[0])
    run = [jax.jit(functools.partial(program, model)) for program, *_ in PROGRAMS]
    changed = []
    for case in range(cases):
        is_eager = case < 3
        index = case if is_eager else rng.choice(len(run), p=OFTEN / OFTEN.sum())
        program, shape, _ = PROGRAMS[index]
        which = rng.integers(TOKENS, size=np.prod(shape))
        batch = x[which]
        padded = rng.random(len(which)) < rng.choice([0.0, 0.5])
        batch[padded] = rng.choice([0.0, 1e4, np.nan]).astype(x.dtype)
        batch = batch.reshape(*shape, K)
        results = program(model, batch) if is_eager else run[index](batch)
        y = jax.tree.leaves(results)[0]
        if (bits_of(y)[~padded] != bits[which[~padded]]).any():
            changed.append((program.__name__, shape))
    return changed


def bits_of(y):
    y = np.asarray(y).reshape(-1, N)
    return y.view({2: np.uint16, 4: np.uint32}[y.itemsize])


def _skip_unless_supported(recipe, implementation):
    """Skips the test on a GPU that does not have the kernels."""
    gemm = recipe.fwd
    sides = gemm.block_shape(recipe.block_shape) if gemm.splits_contraction else ()
    try:
        request = Request("matmul", sides, recipe.codes)
        dispatch.choose_for(request, implementation)
    except ValueError as error:
        pytest.skip(str(error))


implementations = pytest.mark.parametrize(
    "implementation",
    [
        "reference",
        pytest.param("triton", marks=pytest.mark.gpu),
        pytest.param("mosaic", marks=pytest.mark.gpu),
    ],
)
dtypes = pytest.mark.parametrize("dtype", with_first_fast(["bfloat16", "float32"]))


@implementations
@dtypes
@pytest.mark.parametrize("name", ["rowwise", "row_block_lhs"])
def test_a_token_does_not_depend_on_its_batch(name, dtype, implementation):
    _skip_unless_supported(ORDERED[name], implementation)
    assert changed_outputs(Model(name, dtype, implementation), 50) == []


@pytest.mark.exhaustive
@implementations
@dtypes
@pytest.mark.parametrize("name", ["rowwise", "row_block_lhs"])
def test_what_follows_a_layer_does_not_change_its_rounding(name, dtype, implementation):
    """XLA may fuse a sum with the layer's last step."""
    _skip_unless_supported(ORDERED[name], implementation)
    model = Model(name, dtype, implementation)
    params = model.frozen["params"]
    frozen = {**model.frozen, "params": {**params, "bias": jnp.zeros(N)}}

    def multiply(x):
        return model.dense.apply(frozen, x).astype(jnp.float32)

    x = model.x[:256]
    noise = jax.random.normal(jax.random.key(2), (256, N))
    got = jax.jit(lambda x: multiply(x) + noise)(x)
    np.testing.assert_array_equal(got, jax.jit(multiply)(x) + noise)


@pytest.mark.exhaustive
@implementations
@dtypes
@pytest.mark.parametrize("name", INVARIANT)
def test_a_thousand_cases(name, dtype, implementation):
    """Half of them in each dtype."""
    _skip_unless_supported(ORDERED[name], implementation)
    assert changed_outputs(Model(name, dtype, implementation), 500) == []


@pytest.mark.parametrize("name", with_first_fast(OTHERS))
def test_where_tokens_share_scales_the_check_fails(name):
    assert changed_outputs(Model(name, "float32", "reference"), 3)
