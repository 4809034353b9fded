"""A whole mixture of experts in a training step: router, dispatch, experts, combine."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax import recipes
from fbq_jax.bench import data, layers, measure
from fbq_jax.bench.grouped_programs import tokamax_ragged_dot
from fbq_jax.bench.measure import Effort, RunningStep
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.core.dot_call import RaggedCall, RaggedDotGeneral
from fbq_jax.core.expert_plan import ExpertSharding
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.core.routing import Routing
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.linen.moe import MoEMLP
from fbq_jax.ops import dispatch

#: ``(tokens, D, F, experts, experts of a token)`` of Mixtral 8x7B and Qwen3-30B-A3B.
SHAPES = ((8192, 4096, 14336, 8, 2), (4096, 2048, 768, 128, 8))
_SETTLING_STEPS = 8
BLOCK_SHAPE = (128, 128, 128)
# The largest errors of INT8 against bf16, through both projections.
_LIMITS = dict.fromkeys(("y", "dx", "dw"), 0.2)

Variables = dict[str, Any]
#: The parameters, the tokens and the gradient of the output.
Operands = tuple[Variables, jax.Array, jax.Array]


class _Library(RaggedDotGeneral):
    """Another library's product of groups, in floats."""

    def __init__(self, ragged_dot: Callable[..., jax.Array]) -> None:
        self._ragged_dot = ragged_dot

    def _compute_ragged(
        self, lhs: jax.Array, rhs: jax.Array, call: RaggedCall
    ) -> jax.Array:
        return self._ragged_dot(lhs, rhs, call.group_sizes)


class Program(NamedTuple):
    """A compiled step ``(state, params, x, dy) -> (state, results)``, and its state."""

    name: str
    backend: str
    falls_back: bool
    step: Callable[..., Any]
    compile_s: float
    state: Variables


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures ``MoEMLP`` for each ``(tokens, D, F, experts, experts of a token)``.

    A step is forward and gradient, without an update; thresholds move.  Parameters and
    tokens are bf16.  Work counts the experts' products.  The baseline multiplies in
    bf16 by Tokamax where that is installed, else by ``lax.ragged_dot``, and saves the
    gate in bf16; the recipes save it as ``MoEMLP`` does by default.

    Raises:
      WrongResultError: if a result differs from bf16's by more than INT8 may.
    """
    choice = dispatch.choose(
        "ragged_matmul", BLOCK_SHAPE, implementation=implementation
    )
    for shape in shapes:
        yield from with_ratios(_rows(shape, choice, effort))


def _rows(
    shape: tuple[int, ...], choice: dispatch.Choice, effort: Effort
) -> Iterator[Row]:
    params, x, dy = make_operands(shape)
    exact: tuple[jax.Array, ...] = ()
    for program in _programs(shape, choice, (params, x, dy)):
        step = RunningStep(program.step, program.state, params, x, dy)
        results = settled(step)
        exact = exact or results
        errors = measure.checked_errors(
            _LIMITS, results, exact, f"{program.name} at {shape}"
        )
        timing = measure.running_timing(step, effort=effort)
        yield row(
            timing,
            work(shape),
            what=program.name,
            implementation=program.backend,
            shape=shape,
            fallback=mean_rate(step.state) if program.falls_back else None,
            errors=errors,
            compile_s=program.compile_s,
        )


def settled(step: RunningStep) -> tuple[jax.Array, ...]:
    """The results of a step once thresholds stay in their range."""
    for _ in range(_SETTLING_STEPS - 1):
        step()
    results: tuple[jax.Array, ...] = step()
    return results


def make_operands(shape: tuple[int, ...]) -> Operands:
    """The operands of ``(tokens, D, F, experts, experts of a token)``, in bf16."""
    tokens, width, *_ = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = data.activation(keys[0], (tokens, width))
    dy = jax.random.normal(keys[1], (tokens, width), jnp.bfloat16)
    params = jax.jit(_layer(shape, None).init)(keys[2], x[:1])["params"]
    return params, x, dy


def _layer(
    shape: tuple[int, ...],
    dot_general: Any,
    expert_sharding: ExpertSharding | None = None,
) -> MoEMLP:
    _, _, hidden, experts, top_k = shape
    return MoEMLP(
        Routing(num_experts=experts, top_k=top_k),
        hidden,
        bits=MoEMLP.bits if isinstance(dot_general, FallbackDot) else None,
        param_dtype=jnp.bfloat16,
        dot_general=dot_general,
        expert_sharding=expert_sharding,
    )


def _programs(
    shape: tuple[int, ...], choice: dispatch.Choice, operands: Operands
) -> Iterator[Program]:
    """bf16, and the recipes."""
    library = tokamax_ragged_dot()
    if library is None:
        yield compile_step("bf16, lax.ragged_dot", "xla", shape, None, operands)
    else:
        dot = _Library(library)
        yield compile_step("bf16, Tokamax", "tokamax", shape, dot, operands)
    for name in layers.RECIPES:
        quantized = FallbackDot(
            recipes.NAMED[name], implementation=choice.implementation
        )
        yield compile_step(name, choice.backend, shape, quantized, operands)


def compile_step(
    name: str,
    backend: str,
    shape: tuple[int, ...],
    dot_general: Any,
    operands: Operands,
    expert_sharding: ExpertSharding | None = None,
) -> Program:
    """Compiles the step of a layer, and calls it once.

    Args:
      name: the name of its rows.
      backend: what multiplies.
      shape: ``(tokens, D, F, experts, experts of a token)``.
      dot_general: the layer's.
      operands: as ``make_operands`` returns them.
      expert_sharding: the layer's; its mesh is set, and the operands are on it.
    """
    layer = _layer(shape, dot_general, expert_sharding)
    params, x, dy = operands

    def first_state() -> Variables:
        one_device = _layer(shape, dot_general)
        variables = dict(one_device.init(jax.random.key(0), x[:1]))
        del variables["params"]
        return variables

    def step(
        state: Variables, params: Variables, x: jax.Array, dy: jax.Array
    ) -> tuple[Variables, tuple[jax.Array, ...]]:
        forward = functools.partial(layer.apply, mutable=list(state))
        y, vjp, moved = jax.vjp(
            lambda params, x: forward({"params": params, **state}, x),
            params,
            x,
            has_aux=True,
        )
        grads, dx = vjp(dy)
        return dict(moved), (y, dx, grads["gate_up"]["kernel"])

    state = jax.jit(first_state)()
    jitted = jax.jit(step, donate_argnums=0)
    compiled, compile_s, (state, _) = measure.first_call(jitted, state, params, x, dy)
    falls_back = isinstance(dot_general, FallbackDot) and (
        dot_general.recipe.criterion is not None
    )
    return Program(name, backend, falls_back, compiled, compile_s, state)


def work(shape: tuple[int, ...]) -> float:
    """The operations of the experts' three projections, forward and backward."""
    tokens, width, hidden, _, top_k = shape
    return 3 * 2.0 * tokens * top_k * 3 * width * hidden
