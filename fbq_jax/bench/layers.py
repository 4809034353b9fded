"""Flax's linear layers as users build them: unrolled stacks, with state that moves."""

import abc
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
from fbq_jax.bench import baselines, matmuls, measure
from fbq_jax.core.layer_stats import fallback_stats
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
Variables = dict[str, Any]


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


class Stack(abc.ABC):
    """Unrolled linear layers without bias, which compute in bf16.

    Attributes:
      name: the recipe or library, as a row names it.
      layer: the Flax class of a layer.
      backend: what computes the products.
      recipe: the library's recipe; None for others.
    """

    name: str
    layer: str
    backend: str
    recipe: Recipe | None

    @abc.abstractmethod
    def start(self, kernels: Sequence[jax.Array]) -> Any:
        """The first state, with copies of the kernels, each ``[K, N]``.

        ``nnx.eval_shape`` takes it: programs are compiled for states without arrays.
        """

    @abc.abstractmethod
    def compile_training(self, state: Any, x: jax.Array, key: jax.Array) -> Program:
        """Compiles ``(state, x, key) -> (state, loss)``: gradient and SGD update."""

    @abc.abstractmethod
    def compile_products(
        self, state: Any, x: jax.Array, dy: jax.Array, key: jax.Array
    ) -> Program:
        """Compiles ``(state, x, dy, key) -> (state, (y, dx, dw))`` of one layer."""

    @abc.abstractmethod
    def first_kernel(self, state: Any) -> jax.Array:
        """The kernel ``[K, N]`` of the first layer."""

    @abc.abstractmethod
    def rates(self, state: Any) -> list[float]:
        """The fallback rate of each layer in the last step."""


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


class LinenStack(Stack):
    """A stack of ``nn.Dense``; its state is the model's variables."""

    layer = "nn.Dense"

    def __init__(
        self,
        name: str,
        backend: str,
        depth: int,
        *,
        recipe: Recipe | None = None,
        **options: Any,
    ) -> None:
        self.name, self.backend, self.recipe = name, backend, recipe
        self._options = options
        self._collections = self._first_collections(depth)

    def start(self, kernels: Sequence[jax.Array]) -> Variables:
        """The first state, with copies of the kernels."""
        params = {
            f"Dense_{i}": {"kernel": jnp.copy(kernel)}
            for i, kernel in enumerate(kernels)
        }
        return {"params": params} | jax.tree.map(jnp.copy, self._collections)

    def compile_training(
        self, state: Variables, x: jax.Array, key: jax.Array
    ) -> Program:
        """Compiles ``(state, x, key) -> (state, loss)``."""
        forward = self._forward(state)

        def step(
            variables: Variables, x: jax.Array, key: jax.Array
        ) -> tuple[Variables, jax.Array]:
            def loss(trained: Variables) -> tuple[jax.Array, Variables]:
                y, moved = forward(trained, variables, x, key)
                return _loss(y), moved

            trained = _trained(variables)
            (value, moved), grads = jax.value_and_grad(loss, has_aux=True)(trained)
            params = jax.tree.map(_sgd, trained["params"], grads["params"])
            return {**grads, "params": params, **moved}, value

        return _compile(jax.jit(step, donate_argnums=0), state, x, key)

    def compile_products(
        self, state: Variables, x: jax.Array, dy: jax.Array, key: jax.Array
    ) -> Program:
        """Compiles ``(state, x, dy, key) -> (state, (y, dx, dw))``."""
        forward = self._forward(state)

        def step(
            variables: Variables, x: jax.Array, dy: jax.Array, key: jax.Array
        ) -> tuple[Variables, tuple[jax.Array, ...]]:
            def products(
                trained: Variables, x: jax.Array
            ) -> tuple[jax.Array, Variables]:
                return forward(trained, variables, x, key)

            y, vjp, moved = jax.vjp(products, _trained(variables), x, has_aux=True)
            grads, dx = vjp(dy)
            (dw,) = jax.tree.leaves(grads["params"])
            return {**grads, "params": variables["params"], **moved}, (y, dx, dw)

        return _compile(jax.jit(step, donate_argnums=0), state, x, dy, key)

    def first_kernel(self, state: Variables) -> jax.Array:
        """The kernel of the first layer."""
        kernel = state["params"]["Dense_0"]["kernel"]
        assert isinstance(kernel, jax.Array)
        return kernel

    def rates(self, state: Variables) -> list[float]:
        """The fallback rate of each layer in the last step."""
        return [float(stats.rate) for stats in fallback_stats(state).values()]

    def _first_collections(self, depth: int) -> Variables:
        """The collections that ``init`` makes, without the parameters."""
        stack = _Dense((_SMALL,) * depth, self._options)

        def collections(x: jax.Array) -> Variables:
            variables = stack.init(jax.random.key(0), x)
            return {name: variables[name] for name in variables if name != "params"}

        x = jnp.zeros((_SMALL, _SMALL), jnp.bfloat16)
        init = jax.jit(collections)
        return init(x) if jax.tree.leaves(init.eval_shape(x)) else {}

    def _forward(self, state: Variables) -> Callable[..., tuple[jax.Array, Variables]]:
        """``(trained, variables, x, key) -> (y, moved collections)``."""
        kernels = [layer["kernel"] for layer in state["params"].values()]
        stack = _Dense(tuple(kernel.shape[1] for kernel in kernels), self._options)

        def forward(
            trained: Variables, variables: Variables, x: jax.Array, key: jax.Array
        ) -> tuple[jax.Array, Variables]:
            moving = [name for name in variables if name not in trained]
            y, moved = stack.apply(
                variables | trained, x, rngs={"params": key}, mutable=moving
            )
            return y, dict(moved)

        return forward


class _Linear(nnx.Module):
    """A stack of ``nnx.Linear`` by a recipe."""

    def __init__(
        self, kernels: Sequence[jax.Array], recipe: Recipe, implementation: str | None
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


class NnxStack(Stack):
    """A stack of ``nnx.Linear``; its state is the model's ``nnx.State``.

    The model is split before the first step, as in Flax's functional training loop:
    ``nnx.jit`` would walk through the model in each step.
    """

    layer = "nnx.Linear"
    recipe: Recipe

    def __init__(self, name: str, recipe: Recipe, implementation: str | None) -> None:
        self.name, self.recipe = f"{name}, nnx", recipe
        self.backend = matmuls.forward_choice(recipe, implementation).backend
        self._implementation = implementation

    def start(self, kernels: Sequence[jax.Array]) -> nnx.State:
        """The first state, with copies of the kernels."""
        return nnx.state(self._model(kernels))

    def compile_training(
        self, state: nnx.State, x: jax.Array, key: jax.Array
    ) -> Program:
        """Compiles ``(state, x, key) -> (state, loss)``."""
        del key  # The model draws its noise from its own state.
        graphdef = self._graphdef(state)

        def step(state: nnx.State, x: jax.Array) -> tuple[nnx.State, jax.Array]:
            model = nnx.merge(graphdef, state)
            value, grads = nnx.value_and_grad(lambda model: _loss(model(x)))(model)
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(_sgd, params, grads))
            return nnx.state(model), value

        return _compile_without_key(step, state, x)

    def compile_products(
        self, state: nnx.State, x: jax.Array, dy: jax.Array, key: jax.Array
    ) -> Program:
        """Compiles ``(state, x, dy, key) -> (state, (y, dx, dw))``."""
        del key
        graphdef = self._graphdef(state)

        def step(
            state: nnx.State, x: jax.Array, dy: jax.Array
        ) -> tuple[nnx.State, tuple[jax.Array, ...]]:
            def scalar(model: _Linear, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                y = model(x)  # The scalar, whose gradient is dy there, is never read.
                return jnp.vdot(y.astype(jnp.float32), dy.astype(jnp.float32)), y

            model = nnx.merge(graphdef, state)
            (grads, dx), y = nnx.grad(scalar, argnums=(0, 1), has_aux=True)(model, x)
            (dw,) = jax.tree.leaves(grads)
            return nnx.state(model), (y, dx, dw)

        return _compile_without_key(step, state, x, dy)

    def first_kernel(self, state: nnx.State) -> jax.Array:
        """The kernel of the first layer."""
        kernel: jax.Array = jax.tree.leaves(state["layers"][0]["kernel"])[0]
        return kernel

    def rates(self, state: nnx.State) -> list[float]:
        """The fallback rate of each layer in the last step."""
        layers = state["layers"].values()
        return [float(layer["dot_general"]["rate"].get_value()) for layer in layers]

    def _model(self, kernels: Sequence[jax.Array]) -> _Linear:
        return _Linear(kernels, self.recipe, self._implementation)

    def _graphdef(self, state: nnx.State) -> Any:
        """The structure of the model with this state."""
        kernels = [layer["kernel"].get_value() for layer in state["layers"].values()]
        return nnx.graphdef(nnx.eval_shape(self._model, kernels))


def bf16(depth: int) -> Stack:
    """The stack of unquantized layers."""
    return LinenStack("bf16", "xla", depth)


def flax_fp8(depth: int) -> Stack:
    """The stack of layers with Flax's FP8 op."""
    return LinenStack(
        "Flax Fp8DotGeneral", "xla", depth, dot_general_cls=nn.Fp8DotGeneral
    )


def linen(
    depth: int, implementation: str | None, names: Sequence[str] = RECIPES
) -> Iterator[Stack]:
    """The stacks of ``nn.Dense`` with the recipes of these names that run here."""
    for name in names:
        recipe = recipes.NAMED[name]
        if not matmuls.is_supported(recipe, implementation):
            continue
        yield LinenStack(
            name,
            matmuls.forward_choice(recipe, implementation).backend,
            depth,
            recipe=recipe,
            dot_general=FallbackDot(recipe, implementation=implementation),
        )


def nnx_stack(name: str, implementation: str | None) -> Stack:
    """The stack of ``nnx.Linear`` with a named recipe."""
    return NnxStack(name, recipes.NAMED[name], implementation)


def installed_int8_libraries(depth: int) -> Iterator[Stack]:
    """Stacks by AQT and Qwix where installed; stderr names the missing ones."""
    for name, options in baselines.installed_int8_layers():
        yield LinenStack(name, "xla", depth, **options)


def compile_together(compilations: Sequence[Callable[[], Compiled]]) -> list[Compiled]:
    """Compiles several programs at the same time, in ``THREADS`` threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(compilation) for compilation in compilations]
        return [future.result() for future in futures]


def rates_in_range(stack: Stack, state: Any) -> bool:
    """Whether the fallback rate of each layer is inside the recipe's range."""
    if stack.recipe is None or stack.recipe.criterion is None:
        return True
    low, high = stack.recipe.target_rate
    return all(low <= rate <= high for rate in stack.rates(state))


def checked_rate(stack: Stack, state: Any, what: str) -> float | None:
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


def mean_rate(stack: Stack, state: Any) -> float | None:
    """The mean fallback rate of the layers in the last step; None without fallback."""
    if stack.recipe is None or stack.recipe.criterion is None:
        return None
    rates = stack.rates(state)
    return sum(rates) / len(rates)


def _trained(variables: Variables) -> Variables:
    """The collections that are differentiated: parameters and Flax's FP8 state."""
    names = ("params", OVERWRITE_WITH_GRADIENT)
    return {name: variables[name] for name in names if name in variables}


def _loss(y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def _sgd(param: jax.Array, grad: jax.Array) -> jax.Array:
    return param - LEARNING_RATE * grad


def _compile(function: Any, *args: Any) -> Program:
    start = time.perf_counter()
    compiled = function.lower(*args).compile()
    return Program(compiled, compiled.as_text(), time.perf_counter() - start)


def _compile_without_key(
    function: Callable[..., Any], state: nnx.State, *args: Any
) -> Program:
    """Compiles ``(state, *args)``; the program drops the key that follows ``args``."""
    program = _compile(jax.jit(function, donate_argnums=0), state, *args)

    def step(state: nnx.State, *inputs: Any) -> tuple[nnx.State, Any]:
        new, results = program.step(state, *inputs[: len(args)])
        return new, results

    return program._replace(step=step)
