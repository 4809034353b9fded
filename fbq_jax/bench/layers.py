"""Flax's linear layers as users build them: unrolled stacks, with state that moves."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fbq_jax import optim, recipes
from fbq_jax.bench import matmuls
from fbq_jax.bench.compare import Program, compile_step
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.linen.state import codes_collection
from fbq_jax.linen.step_codes import quantize_weights_once
from fbq_jax.nnx import dot as nnx_dot
from fbq_jax.recipes.schema import Recipe

RECIPES = ("block", "fallback")
# Large enough for updates that float32 weights resolve, and too small to move the
# activations' blocks while steps are timed.
LEARNING_RATE = 0.01
# The state of a layer does not depend on its size, so it is made by small layers.
_SMALL = 128

#: The collection of codes that the optimizer writes.
CODES = codes_collection("fallback")

Kernels = Sequence[jax.Array]
# What is differentiated, with the kernels as ``"params"``, and what else moves.
State = tuple[dict[str, Any], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """Unrolled linear layers without bias, which compute in bf16."""

    name: str  # the recipe or library, as a row names it
    backend: str  # what computes the products
    recipe: Recipe | None  # the library's recipe; None for others
    start: Callable[[Kernels], State]  # makes the first state, of kernels ``[K, N]``
    # The function ``(state, x, key) -> (y, new second part of the state)``.
    forward: Callable[[State, jax.Array, jax.Array], tuple[jax.Array, Any]]

    def program(
        self,
        step: Callable[..., Any],
        kernels: Callable[[], Kernels],
        *inputs: jax.Array,
    ) -> Program:
        """Compiles ``training_step`` or ``products_step``, for arrays or shapes.

        Nothing is allocated before the program runs and ``kernels`` makes the kernels.
        """
        # Not ``jax.eval_shape``, because layers of NNX are made there.
        state = nnx.eval_shape(lambda: self.start(kernels()))
        compiled, seconds = compile_step(functools.partial(step, self), state, *inputs)
        return Program(
            self.name,
            self.backend,
            compiled,
            lambda: self.start(kernels()),
            seconds,
            self.rates,
            self.recipe.target_rate if self.recipe else (0.0, 1.0),
        )

    def rates(self, state: State) -> list[float]:
        """The fallback rate of each layer in the last step; none without fallback."""
        if self.recipe is None or self.recipe.criterion is None:
            return []
        return [
            float(leaf)
            for path, leaf in jax.tree.leaves_with_path(state[1])
            if "rate" in jax.tree_util.keystr(path)
        ]


def training_step(stack: Stack, state: State, x: jax.Array, key: jax.Array) -> Any:
    """Gradient and SGD update: ``(state, loss)``.

    A state with codes of the weights gets new ones with the update.
    """
    trained, moving = state

    def loss(trained: dict[str, Any]) -> tuple[jax.Array, Any]:
        y, moved = stack.forward((trained, moving), x, key)
        return jnp.mean(jnp.square(y.astype(jnp.float32))), moved

    if CODES in moving:
        return _step_with_codes(loss, trained, {CODES: moving[CODES]})
    (value, moved), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    params = jax.tree.map(
        lambda param, grad: param - LEARNING_RATE * grad,
        trained["params"],
        grads["params"],
    )
    return ({**grads, "params": params}, moved), value


def _step_with_codes(
    loss: Callable[..., Any], trained: dict[str, Any], codes: dict[str, Any]
) -> Any:
    """``training_step`` whose optimizer writes the codes of the weights."""
    writer, params = optim.with_codes(optax.sgd(LEARNING_RATE)), trained["params"]
    weights = {"params": writer.differentiable(params, codes)}
    (value, moved), grads = jax.value_and_grad(loss, has_aux=True)(weights)
    state = writer.init(params)
    params, _, codes = writer.update(grads["params"], state, params, codes)
    return ({"params": params}, {**moved, **codes}), value


def products_step(
    stack: Stack, state: State, x: jax.Array, dy: jax.Array, key: jax.Array
) -> Any:
    """The three products of one layer: ``(state, (y, dx, dw))``."""
    trained, moving = state
    y, vjp, moved = jax.vjp(
        lambda trained, x: stack.forward((trained, moving), x, key),
        trained,
        x,
        has_aux=True,
    )
    grads, dx = vjp(dy)
    (dw,) = jax.tree.leaves(grads["params"])
    return ({**grads, "params": trained["params"]}, moved), (y, dx, dw)


def first_kernel(state: State) -> jax.Array:
    """The kernel ``[K, N]`` of a stack's first layer."""
    kernel: jax.Array = jax.tree.leaves(state[0]["params"])[0]
    return kernel


class _Dense(nn.Module):
    """A stack of ``nn.Dense``."""

    widths: tuple[int, ...]
    options: Mapping[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths:
            options = {"use_bias": False, "dtype": jnp.bfloat16, **self.options}
            x = nn.Dense(width, **options)(x)
        return x


def linen_stack(
    name: str,
    backend: str,
    depth: int,
    *,
    recipe: Recipe | None = None,
    keeps_codes: bool = False,
    **options: Any,
) -> Stack:
    """A stack of ``nn.Dense`` with these options; its state is the collections.

    If it keeps codes, they are a part of the state that moves.
    """

    def init() -> dict[str, Any]:
        """The collections without the parameters, which XLA does not compute."""
        x = jnp.zeros((_SMALL, _SMALL), jnp.bfloat16)
        variables = _Dense((_SMALL,) * depth, options).init(jax.random.key(0), x)
        return {name: variables[name] for name in variables if name != "params"}

    collections = jax.jit(init)()

    def start(kernels: Kernels) -> State:
        moving = jax.tree.map(jnp.copy, collections)
        trained: dict[str, Any] = {
            "params": {
                f"Dense_{i}": {"kernel": jnp.copy(kernel)}
                for i, kernel in enumerate(kernels)
            }
        }
        if OVERWRITE_WITH_GRADIENT in moving:
            trained[OVERWRITE_WITH_GRADIENT] = moving.pop(OVERWRITE_WITH_GRADIENT)
        if keeps_codes:
            model = _Dense(tuple(kernel.shape[1] for kernel in kernels), options)
            x = jnp.zeros((_SMALL, kernels[0].shape[0]), jnp.bfloat16)
            moving |= quantize_weights_once(model, {**trained, **moving}, x)
        return trained, moving

    def forward(state: State, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        trained, moving = state
        kernels = jax.tree.leaves(trained["params"])
        widths = tuple(kernel.shape[1] for kernel in kernels)
        y, moved = _Dense(widths, options).apply(
            moving | trained,
            x,
            rngs={"params": key},
            mutable=[name for name in moving if name != CODES],
        )
        return y, dict(moved)

    return Stack(name, backend, recipe, start, forward)


class _Linear(nnx.Module):
    """A stack of ``nnx.Linear`` by a recipe."""

    def __init__(
        self, recipe: Recipe, implementation: str | None, kernels: Kernels
    ) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            nnx.Linear(
                *kernel.shape,
                use_bias=False,
                dtype=jnp.bfloat16,
                kernel_init=lambda *_, kernel=kernel: jnp.copy(kernel),
                dot_general=nnx_dot.FallbackDot(
                    recipe, rngs=rngs, implementation=implementation
                ),
                rngs=rngs,
            )
            for kernel in kernels
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def nnx_stack(name: str, implementation: str | None) -> Stack:
    """The stack of ``nnx.Linear`` with a named recipe.

    The model is split before the first step, as in Flax's functional training loop:
    ``nnx.jit`` would walk through the model in each step.
    """
    recipe = recipes.NAMED[name]
    build = functools.partial(_Linear, recipe, implementation)

    def start(kernels: Kernels) -> State:
        params, moving = nnx.state(build(kernels), nnx.Param, ...)
        return {"params": params}, moving

    def forward(state: State, x: jax.Array, _: jax.Array) -> tuple[jax.Array, Any]:
        params, moving = state[0]["params"], state[1]
        graphdef = nnx.graphdef(nnx.eval_shape(build, jax.tree.leaves(params)))
        model = nnx.merge(graphdef, params, moving, copy=True)
        y = model(x)  # The model draws its noise from its own state.
        return y, nnx.state(model, nnx.Param, ...)[1]

    backend = matmuls.forward_choice(recipe, implementation).backend
    return Stack(f"{name}, nnx", backend, recipe, start, forward)


def bf16(depth: int) -> Stack:
    """The stack of unquantized layers."""
    return linen_stack("bf16", "xla", depth)


def name_with_codes(name: str) -> str:
    """The name of a row of a recipe whose optimizer writes codes."""
    return f"{name}, codes kept"


def flax_fp8(depth: int) -> Stack:
    """The stack of layers with Flax's FP8 op."""
    op = nn.Fp8DotGeneral
    return linen_stack("Flax Fp8DotGeneral", "xla", depth, dot_general_cls=op)


def linen(
    depth: int,
    implementation: str | None,
    names: Sequence[str] = RECIPES,
    *,
    keeps_codes: bool = False,
) -> Iterator[Stack]:
    """Stacks of ``nn.Dense``, one for each named recipe that runs here.

    If they keep codes, the optimizer writes them.
    """
    for name, recipe, backend in matmuls.supported(names, implementation):
        yield linen_stack(
            name_with_codes(name) if keeps_codes else name,
            backend,
            depth,
            recipe=recipe,
            keeps_codes=keeps_codes,
            dot_general=FallbackDot(recipe, implementation=implementation),
        )


def installed_int8_libraries(depth: int) -> Iterator[Stack]:
    """Stacks by AQT and Qwix where installed; stderr names the missing ones."""
    for name, options in matmuls.installed_int8_libraries():
        yield linen_stack(name, "xla", depth, **options)
