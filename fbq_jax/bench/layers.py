"""Flax's linear layers as users build them: unrolled stacks, with state that moves."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fbq_jax import recipes
from fbq_jax.bench import matmuls, measure
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.nnx import dot as nnx_dot
from fbq_jax.recipes.schema import Recipe

RECIPES = ("block", "fallback")
THREADS = 8  # that compile
# Large enough for updates that float32 weights resolve, and too small to move the
# activations' blocks while steps are timed.
LEARNING_RATE = 0.01
# The state of a layer does not depend on its size, so it is made by small layers.
_SMALL = 128

Compiled = TypeVar("Compiled")
# What is differentiated, with the kernels as ``"params"``, and what else moves.
State = tuple[dict[str, Any], Any]


class Program(NamedTuple):
    """A compiled step of a stack.

    Attributes:
      step: ``(state, *inputs) -> (new state, results)``; it donates the state.
      text: the compiled program's HLO.
      compile_s: seconds of tracing and compilation.
    """

    step: Callable[..., tuple[Any, Any]]
    text: str
    compile_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """Unrolled linear layers without bias, which compute in bf16.

    Attributes:
      name: the recipe or library, as a row names it.
      layer: the Flax class of a layer.
      backend: what computes the products.
      recipe: the library's recipe; None for others.
      start: makes the first state, with copies of the kernels ``[K, N]``.
        ``nnx.eval_shape`` takes it: programs are compiled for states without arrays.
      forward: the function ``(state, x, key) -> (y, new second part of the state)``.
    """

    name: str
    layer: str
    backend: str
    recipe: Recipe | None
    start: Callable[[Sequence[jax.Array]], State]
    forward: Callable[[State, jax.Array, jax.Array], tuple[jax.Array, Any]]

    def compile_training(self, state: State, x: jax.Array, key: jax.Array) -> Program:
        """Compiles ``(state, x, key) -> (state, loss)``: gradient and SGD update."""

        def step(state: State, x: jax.Array, key: jax.Array) -> tuple[State, jax.Array]:
            trained, moving = state

            def loss(trained: dict[str, Any]) -> tuple[jax.Array, Any]:
                y, moved = self.forward((trained, moving), x, key)
                return jnp.mean(jnp.square(y.astype(jnp.float32))), moved

            (value, moved), grads = jax.value_and_grad(loss, has_aux=True)(trained)
            params = jax.tree.map(
                lambda param, grad: param - LEARNING_RATE * grad,
                trained["params"],
                grads["params"],
            )
            return ({**grads, "params": params}, moved), value

        return _compile(step, state, x, key)

    def compile_products(
        self, state: State, x: jax.Array, dy: jax.Array, key: jax.Array
    ) -> Program:
        """Compiles ``(state, x, dy, key) -> (state, (y, dx, dw))`` of one layer."""

        def step(state: State, x: jax.Array, dy: jax.Array, key: jax.Array) -> Any:
            trained, moving = state
            y, vjp, moved = jax.vjp(
                lambda trained, x: self.forward((trained, moving), x, key),
                trained,
                x,
                has_aux=True,
            )
            grads, dx = vjp(dy)
            (dw,) = jax.tree.leaves(grads["params"])
            return ({**grads, "params": trained["params"]}, moved), (y, dx, dw)

        return _compile(step, state, x, dy, key)

    def first_kernel(self, state: State) -> jax.Array:
        """The kernel ``[K, N]`` of the first layer."""
        kernel: jax.Array = jax.tree.leaves(state[0]["params"])[0]
        return kernel

    def rates(self, state: State) -> list[float]:
        """The fallback rate of each layer in the last step; none without fallback."""
        if self.recipe is None or self.recipe.criterion is None:
            return []
        return [
            float(leaf)
            for path, leaf in jax.tree.leaves_with_path(state[1])
            if "rate" in jax.tree_util.keystr(path)
        ]


def _compile(function: Callable[..., Any], *args: Any) -> Program:
    """Compiles a step that donates its state."""
    start = time.perf_counter()
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile()
    return Program(compiled, compiled.as_text() or "", time.perf_counter() - start)


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
    **options: Any,
) -> Stack:
    """A stack of ``nn.Dense`` with these options; its state is the collections."""

    def first_collections(x: jax.Array) -> dict[str, Any]:
        """The collections that ``init`` makes, without the parameters."""
        variables = _Dense((_SMALL,) * depth, options).init(jax.random.key(0), x)
        return {name: variables[name] for name in variables if name != "params"}

    x = jnp.zeros((_SMALL, _SMALL), jnp.bfloat16)
    init = jax.jit(first_collections)
    collections = init(x) if jax.tree.leaves(init.eval_shape(x)) else {}

    def start(kernels: Sequence[jax.Array]) -> State:
        moving = jax.tree.map(jnp.copy, collections)
        trained: dict[str, Any] = {
            "params": {
                f"Dense_{i}": {"kernel": jnp.copy(kernel)}
                for i, kernel in enumerate(kernels)
            }
        }
        if OVERWRITE_WITH_GRADIENT in moving:
            trained[OVERWRITE_WITH_GRADIENT] = moving.pop(OVERWRITE_WITH_GRADIENT)
        return trained, moving

    def forward(state: State, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        trained, moving = state
        kernels = jax.tree.leaves(trained["params"])
        widths = tuple(kernel.shape[1] for kernel in kernels)
        y, moved = _Dense(widths, options).apply(
            moving | trained, x, rngs={"params": key}, mutable=list(moving)
        )
        return y, dict(moved)

    return Stack(name, "nn.Dense", backend, recipe, start, forward)


class _Linear(nnx.Module):
    """A stack of ``nnx.Linear`` by a recipe."""

    def __init__(
        self, recipe: Recipe, implementation: str | None, kernels: Sequence[jax.Array]
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

    def start(kernels: Sequence[jax.Array]) -> State:
        params, moving = nnx.state(build(kernels), nnx.Param, ...)
        return {"params": params}, moving

    def forward(state: State, x: jax.Array, _: jax.Array) -> tuple[jax.Array, Any]:
        params, moving = state[0]["params"], state[1]
        graphdef = nnx.graphdef(nnx.eval_shape(build, jax.tree.leaves(params)))
        model = nnx.merge(graphdef, params, moving, copy=True)
        y = model(x)  # The model draws its noise from its own state.
        return y, nnx.state(model, nnx.Param, ...)[1]

    backend = matmuls.forward_choice(recipe, implementation).backend
    return Stack(f"{name}, nnx", "nnx.Linear", backend, recipe, start, forward)


def bf16(depth: int) -> Stack:
    """The stack of unquantized layers."""
    return linen_stack("bf16", "xla", depth)


def flax_fp8(depth: int) -> Stack:
    """The stack of layers with Flax's FP8 op."""
    op = nn.Fp8DotGeneral
    return linen_stack("Flax Fp8DotGeneral", "xla", depth, dot_general_cls=op)


def linen(
    depth: int, implementation: str | None, names: Sequence[str] = RECIPES
) -> Iterator[Stack]:
    """Stacks of ``nn.Dense``, one for each named recipe that runs here."""
    for name, recipe in matmuls.supported(names, implementation):
        backend = matmuls.forward_choice(recipe, implementation).backend
        dot = FallbackDot(recipe, implementation=implementation)
        yield linen_stack(name, backend, depth, recipe=recipe, dot_general=dot)


def installed_int8_libraries(depth: int) -> Iterator[Stack]:
    """Stacks by AQT and Qwix where installed; stderr names the missing ones."""
    for matmul, options in matmuls.installed_int8_libraries():
        yield linen_stack(matmul.name, "xla", depth, **options)


def compile_together(compilations: Sequence[Callable[[], Compiled]]) -> list[Compiled]:
    """Compiles several programs at the same time, in ``THREADS`` threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda compilation: compilation(), compilations))


def rates_in_range(stack: Stack, state: State) -> bool:
    """Whether the fallback rate of each layer is inside the recipe's range."""
    low, high = stack.recipe.target_rate if stack.recipe else (0.0, 1.0)
    return all(low <= rate <= high for rate in stack.rates(state))


def checked_rate(stack: Stack, state: State, what: str) -> float | None:
    """The mean fallback rate of the layers in the last step; None without fallback.

    Raises:
      WrongResultError: if a layer's rate is outside the recipe's range.
    """
    if stack.recipe is None or rates_in_range(stack, state):
        return mean_rate(stack, state)
    low, high = stack.recipe.target_rate
    rates = stack.rates(state)
    raise measure.WrongResultError(
        f"{what} has layers with fallback rates from {min(rates):.1%} to "
        f"{max(rates):.1%}, outside the recipe's range of {low:.1%} to {high:.1%}; its "
        "time is not reported"
    )


def mean_rate(stack: Stack, state: State) -> float | None:
    """The mean fallback rate of the layers in the last step; None without fallback."""
    rates = stack.rates(state)
    return sum(rates) / len(rates) if rates else None
