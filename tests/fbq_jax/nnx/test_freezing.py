"""A frozen NNX model computes what the trained one does, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from fbq_jax import FLOAT_GEMM, Recipe, recipes
from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.nnx import FallbackDot, FallbackEinsum, fallback_stats, freeze

ocp = pytest.importorskip("orbax.checkpoint")

RECIPE = Recipe(block=32)
BLOCK = functools.partial(FallbackDot, recipes.block)
X = jax.random.normal(jax.random.key(0), (4, 8, 64)).at[0, 3, 5].set(50.0)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        dot = FallbackDot(RECIPE, rngs=rngs)
        self.heads = nnx.LinearGeneral(
            64, (4, 16), dot_general=dot, dtype=jnp.bfloat16, rngs=rngs
        )

    def __call__(self, x):
        return x + self.heads(x).reshape(x.shape).astype(x.dtype)


class Stack(nnx.Module):
    """Two blocks under a scan, and a layer without its own dtype."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def blocks(rngs):
            return Block(rngs)

        self.blocks = blocks(rngs)
        dot = FallbackDot(RECIPE, rngs=rngs)
        self.head = nnx.Linear(64, 8, use_bias=False, dot_general=dot, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def scan(x, block):
            return block(x)

        return self.head(scan(x, self.blocks))


@pytest.fixture(scope="module")
def trained():
    @nnx.jit
    def train():
        model = Stack(nnx.Rngs(1))
        model(X)
        return model

    return train()


@pytest.fixture(scope="module")
def frozen(trained):
    return freeze(trained, jax.ShapeDtypeStruct(X.shape, X.dtype))


@nnx.jit
def serve(model, x):
    return model(x)


def test_a_frozen_model_computes_what_was_trained(trained, frozen):
    evaluated = nnx.clone(trained)
    evaluated.eval()
    y, z = serve(evaluated, X), serve(frozen, X)
    assert y.dtype == z.dtype
    assert jnp.all(jnp.isfinite(y))
    assert jnp.all(y == z)
    before, after = fallback_stats(trained), fallback_stats(frozen)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after))
    # Freezing leaves the trained model as it was.
    assert trained.head.dot_general.weight is None
    assert not trained.head.dot_general.use_running_average
    assert trained.head.kernel.shape == (64, 8)


def test_half_the_bytes_of_bfloat16(trained, frozen):
    layer = frozen.blocks.heads
    assert layer.kernel == FrozenKernel((64, 4, 16), jnp.dtype("float32"))
    arrays = jax.tree.leaves(layer.dot_general.weight.get_value())
    nbytes = sum(array.nbytes for array in arrays)
    assert 0.5 < nbytes / (2 * trained.blocks.heads.kernel.size) < 0.504


def test_saves_and_loads_with_orbax(frozen, tmp_path):
    like = nnx.eval_shape(lambda: freeze(Stack(nnx.Rngs(0)), X))
    graphdef, abstract = nnx.split(like)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "frozen", nnx.state(frozen))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "frozen", abstract)
    loaded = nnx.merge(graphdef, state)
    assert jnp.all(serve(loaded, X) == serve(frozen, X))


EXPERTS = X.reshape(2, 16, 64)
OTHER_WAY = "ebd,efd->bef"


class Experts(nnx.Module):
    def __init__(self, both=False):
        # Recipe.start sets the threshold without training.
        op = FallbackEinsum(dataclasses.replace(RECIPE, start=5.0))
        options = {"einsum_op": op, "dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.up = nnx.Einsum("ebd,edf->bef", (2, 64, 64), (2, 64), **options)
        self.both = both

    def __call__(self, x):
        return self.up(x) + (self.up(x, OTHER_WAY) if self.both else 0.0)


@pytest.mark.exhaustive
def test_frozen_einsums_compute_what_was_trained():
    model = Experts()
    frozen = freeze(model, EXPERTS)
    assert frozen.up.kernel == FrozenKernel((2, 64, 64), jnp.dtype("float32"))
    y = serve(model, EXPERTS)
    assert fallback_stats(model)["up"].count == 1
    assert 0.0 < fallback_stats(model)["up"].rate < 1.0
    assert jnp.all(serve(frozen, EXPERTS) == y)
    with pytest.raises(ValueError, match=r"over the axes \(1,\).*another, over \(2,\)"):
        frozen.up(EXPERTS, OTHER_WAY)
    with pytest.raises(ValueError, match=r"layer 'up' has codes for one product"):
        freeze(Experts(both=True), EXPERTS)


def linear(**options):
    options = {"dot_general": BLOCK(), "rngs": nnx.Rngs(0), **options}
    return nnx.Linear(64, 64, **options)


class Holding(nnx.Module):
    """A model of a layer, whose call is a function of both and the input."""

    def __init__(self, layer, call=lambda self, x: self.layer(x), **others):
        self.layer, self.call = layer, call
        for name, value in others.items():
            setattr(self, name, value)

    def __call__(self, x, *args):
        return self.call(self, x, *args)


class Own(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x).astype(jax.typeof(self.kernel[...]).dtype)


def doubled(args, **options):
    x, kernel, *others = promote_dtype(args, **options)
    return x, 2 * kernel, *others


def also_reads(self, x):
    return self.layer(x) / jnp.linalg.norm(self.layer.kernel[...])


def scales(self, x):
    """By an integer of the input, and by way of a comparison."""
    kernel = self.layer.kernel[...]
    self.layer.kernel[...] = jnp.where(jnp.argmax(x) > 3, 2 * kernel, kernel)
    return self.layer(x)


def negates(self, x):
    x = self.layer(x)
    self.layer.kernel[...] = -self.layer.kernel[...]
    return self.layer(x)


def of_two_layers():
    dot = BLOCK()
    return nnx.Sequential(linear(dot_general=dot), linear(dot_general=dot))


FLOAT_FORWARD = dataclasses.replace(recipes.rowwise, fwd=FLOAT_GEMM)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(dot_general=FallbackDot()), r"no threshold yet .* \(root\)\."),
        (lambda: nnx.Linear(64, 8, rngs=nnx.Rngs(0)), "no layer that multiplies by"),
        (lambda: linear(dot_general=FallbackDot(FLOAT_FORWARD)), "no codes to freeze"),
        (lambda: Holding(linear(), lambda _, x: x), "does not run layer;"),
        (
            lambda: Holding(FallbackEinsum(recipes.block)),
            "'layer/dot_general' of a FallbackEinsum",
        ),
        (
            lambda: Holding(Holding(None, dot_general=BLOCK())),
            r"MoEMLP; .*'layer/dot_general' of a Holding",
        ),
        (lambda: Holding(linear(), dot=BLOCK()), r"freeze .* 'dot' of a Holding"),
        (of_two_layers, "'layers/0' and 'layers/1' share one Fallb"),
        (
            lambda: Own(64, 8, dot_general=BLOCK(), rngs=nnx.Rngs(0)),
            "its class Own has a __call__ of its own",
        ),
        (lambda: linear(promote_dtype=doubled), "its promote_dtype is not Flax's"),
        (lambda: Holding(linear(), also_reads), "would remove 'layer/kernel', which"),
        (lambda: Holding(linear(), scales), "weights of layer once: they depend on"),
        (lambda: Holding(linear(), negates), "'layer' multiplies by several weights"),
    ],
)
def test_what_cannot_be_frozen_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        freeze(make(), X)


def test_wrong_use_is_refused(frozen):
    training = nnx.clone(frozen)
    training.train()
    with pytest.raises(
        ValueError, match="layer 'blocks/heads' is frozen and does not train"
    ):
        training(X)
    with pytest.raises(ValueError, match="freeze takes a model once; 'blocks/heads'"):
        freeze(frozen, X)
    with pytest.raises(TypeError, match=r"freeze\(model, x\); got an nnx.State"):
        freeze(linear(), nnx.state(linear()), X)


def test_a_model_that_changes_an_argument():
    """As a model does with a cache."""

    def call(self, x, counter):
        counter[...] += 1
        return self.layer(x)

    model, counter = Holding(linear(), call), nnx.Variable(jnp.zeros(()))
    model(X, counter)
    frozen = freeze(model, X, counter)
    assert counter[...] == 1
    model.eval()
    np.testing.assert_array_equal(frozen(X, counter), model(X, counter))


class Tied(nnx.Module):
    """Two layers with one kernel, which NNX lists under the name that comes first."""

    def __init__(self, rngs: nnx.Rngs, first: str, second: str):
        self.names = first, second
        for name in self.names:
            dot = FallbackDot(RECIPE, rngs=rngs)
            setattr(self, name, nnx.Linear(64, 64, dot_general=dot, rngs=rngs))
        getattr(self, second).kernel = getattr(self, first).kernel

    def __call__(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_layers_that_share_a_kernel_can_be_frozen(names):
    model = Tied(nnx.Rngs(0), *names)
    y = serve(model, X)
    frozen = freeze(model, X)
    assert frozen.a.kernel == frozen.b.kernel == FrozenKernel((64, 64), X.dtype)
    assert not jnp.array_equal(serve(frozen, 2.0 * X), y)
    model.eval()
    assert jnp.all(serve(frozen, X) == serve(model, X))


@pytest.mark.parametrize("use_scale", [True, False])
def test_codes_are_those_of_the_weight_that_a_module_normalizes(use_scale):
    model = nnx.WeightNorm(linear(), use_scale=use_scale, rngs=nnx.Rngs(0))
    model.eval()
    np.testing.assert_array_equal(serve(freeze(model, X), X), serve(model, X))
