"""A whole mixture of experts in a training step: router, dispatch, experts, combine."""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fbq_jax.bench import data, layers, matmuls
from fbq_jax.bench.compare import Comparison, Program, compile_step
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.experts.routing import Routing
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.linen.moe import MoEMLP
from fbq_jax.linen.step_codes import quantize_weights_once
from fbq_jax.optim.code_writer import write_codes

#: ``(tokens, D, F, experts, experts of a token)`` of Mixtral 8x7B, Qwen3-30B-A3B and
#: DeepSeek-V3.
SHAPES = (
    (8192, 4096, 14336, 8, 2),
    (4096, 2048, 768, 128, 8),
    (8192, 7168, 2048, 256, 8),
)
# DeepSeek-V3's scores, and its bias for each expert.  It also restricts a token to
# groups of experts, multiplies the weights by 2.5 and adds an expert for all tokens.
_ROUTINGS = {
    (256, 8): Routing(256, top_k=8, scores="sigmoid", bias_update_rate=0.001),
}
_SETTLING_STEPS = 8
# The largest errors of INT8 against bf16, through both projections.
_LIMITS = dict.fromkeys(("y", "dx", "dw"), 0.2)

Variables = dict[str, Any]


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures ``MoEMLP`` for each ``(tokens, D, F, experts, experts of a token)``.

    A step is forward and gradient, without an update; thresholds move.  Where codes are
    kept, an update writes them; there is a row with that part of the update, too.
    Parameters and tokens are bf16.  Work counts the experts' products.  The baseline
    multiplies in bf16 by Tokamax where that is installed, else by ``lax.ragged_dot``,
    and saves the gate in bf16; the recipes save it as ``MoEMLP`` does by default.
    """
    products: list[tuple[Any, ...]] = [bf16()]
    for name, recipe, backend in matmuls.supported(matmuls.TIMED, implementation):
        dot = FallbackDot(recipe, implementation=implementation)
        products.append((name, backend, dot))
        kept = layers.name_with_codes(name)
        products.append((kept, backend, dot, "kept"))
        products.append((f"{kept} and written", backend, dot, "written"))
    for shape in shapes:
        tokens, width, hidden, _, top_k = shape
        keys = jax.random.split(jax.random.key(0), 3)
        x = data.activation(keys[0], (tokens, width))
        dy = jax.random.normal(keys[1], (tokens, width), jnp.bfloat16)
        params = jax.jit(_layer(shape, None).init)(keys[2], x[:1])["params"]
        yield from Comparison(
            shape,
            # Three projections, forward and backward.
            3 * 2.0 * tokens * top_k * 3 * width * hidden,
            (params, x, dy),
            _LIMITS,
            _SETTLING_STEPS,
        ).rows([_program(shape, (params, x, dy), *p) for p in products], effort)


def bf16() -> tuple[str, str, Any]:
    """The name, the backend and the ``dot_general`` of the baseline."""
    try:
        dot = importlib.import_module("tokamax").ragged_dot
    except ImportError as error:
        print(f"without tokamax: {error}", file=sys.stderr)
        return "bf16, lax.ragged_dot", "xla", None
    return "bf16, Tokamax", "tokamax", types.SimpleNamespace(ragged_dot=dot)


def _program(
    shape: tuple[int, ...],
    inputs: tuple[Any, ...],
    name: str,
    backend: str,
    dot: Any,
    codes: Literal["made", "kept", "written"] = "made",
) -> Program:
    """The step of a mixture of experts with this ``dot_general``."""
    layer, (params, x, _) = _layer(shape, dot), inputs
    start = functools.partial(_first_state, layer, params, x, codes != "made")
    step = _step_of(layer, writes_codes=codes == "written")
    compiled, seconds = compile_step(step, start(), *inputs)
    falls_back = isinstance(dot, FallbackDot) and dot.recipe.criterion is not None
    rates = (lambda state: [mean_rate(state) or 0.0]) if falls_back else (lambda _: [])
    return Program(name, backend, compiled, start, seconds, rates)


def _layer(shape: tuple[int, ...], dot_general: Any) -> MoEMLP:
    _, _, hidden, experts, top_k = shape
    return MoEMLP(
        _ROUTINGS.get((experts, top_k)) or Routing(experts, top_k),
        hidden,
        bits=MoEMLP.bits if isinstance(dot_general, FallbackDot) else None,
        param_dtype=jnp.bfloat16,
        dot_general=dot_general,
    )


def _first_state(
    layer: MoEMLP, params: Variables, x: jax.Array, keeps_codes: bool
) -> Variables:
    def init(params: Variables) -> Variables:
        variables = dict(layer.init(jax.random.key(0), x[:1]))
        del variables["params"]
        if keeps_codes:
            known = {"params": params, **variables}
            variables |= quantize_weights_once(layer, known, x)
        return variables

    return jax.jit(init)(params)


def _step_of(
    layer: MoEMLP, *, writes_codes: bool
) -> Callable[..., tuple[Variables, Any]]:
    """The function ``(state, params, x, dy) -> (state, (y, dx, dw))``."""

    def step(state: Variables, params: Variables, x: jax.Array, dy: jax.Array) -> Any:
        moving = [name for name in state if name != layers.CODES]

        def forward(params: Variables, x: jax.Array) -> Any:
            variables = {"params": params, **state}
            return layer.apply(variables, x, mutable=moving)

        y, vjp, moved = jax.vjp(forward, params, x, has_aux=True)
        grads, dx = vjp(dy)
        moved = dict(moved)
        if layers.CODES in state:
            moved[layers.CODES] = state[layers.CODES]
        if writes_codes:
            moved |= write_codes({layers.CODES: state[layers.CODES]}, params)
        return moved, (y, dx, grads["gate_up"]["kernel"])

    return step
