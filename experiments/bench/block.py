"""One Llama block, forward and backward, in bf16 and with each recipe.

The block is attention and SwiGLU, each after an RMSNorm. A quantized block saves INT10
for its non-linear layers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from examples.llama.model import remat_layer
from examples.llama.model_config import LlamaConfig
from experiments.bench import harness, memory
from fbq_jax import Recipe
from fbq_jax.bench import data, measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.core.layer_stats import mean_rate

# (hidden, intermediate, tokens)
SHAPES = (
    (4096, 14336, 16384),
    (2048, 5632, 16384),
    (8192, 28672, 16384),
    (4096, 14336, 8192),
    (2048, 5632, 8192),
)
# Recipes and remat policies that the first shape is also measured with.
REMATS = (("bf16", "full"), ("fallback", "codes"), ("fallback", "full"))
# The error of INT8 against bf16, also in a gradient of random weights.
_LIMITS = dict.fromkeys(("y", "dx"), 0.2)
_SETTLING_STEPS = 4  # until the thresholds fit these operands


class Program(NamedTuple):
    """A compiled block, with the arguments of its step.

    The step returns ``(y, dx, dparams, variables)``; `forward` is the differentiable
    function ``(params, x) -> y``.
    """

    config: LlamaConfig
    implementation: str
    forward: Callable[[Any, jax.Array], jax.Array]
    step: Any
    operands: tuple[Any, jax.Array, jax.Array, Any]
    compile_s: float


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each ``(hidden, intermediate, tokens)``, in sequences of 2048 tokens.

    Work counts the matrix products and causal attention. Raises WrongResultError if an
    output or gradient differs from bf16's by more than INT8 may.
    """
    # A burst keeps the results of all its calls, gradients of all weights.
    effort = effort._replace(launches=min(effort.launches, 5))
    saved: dict[tuple[Any, ...], float] = {}
    for shape in shapes:
        remats = REMATS if shape == shapes[0] else ()
        yield from with_ratios(_rows(shape, remats, saved, implementation, effort))


def _rows(
    shape: tuple[int, ...],
    remats: Sequence[tuple[str, str]],
    saved: dict[tuple[Any, ...], float],
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures one shape; records saved bytes by name and widths in ``saved``."""
    recipes = harness.recipes()
    exact: tuple[jax.Array, ...] = ()
    for name, remat in [*((name, "none") for name in recipes), *remats]:
        program = prepare(shape, recipes[name], implementation, remat)
        y_and_dx = program.step(*program.operands)[:2]
        exact = exact or y_and_dx
        what = name if remat == "none" else f"{name}, remat {remat}"
        errors = measure.checked_errors(_LIMITS, y_and_dx, exact, f"{what} at {shape}")
        # Saved bytes per token do not depend on the number of tokens.
        if (block := (what, *shape[:2])) not in saved:
            params, x, *_ = program.operands
            nbytes = memory.saved_bytes(program.forward, params, x)
            saved[block] = nbytes / x.shape[1]
        yield row(
            measure.timing(program.step, *program.operands, effort=effort),
            harness.work(program.config, shape[-1]),
            what=what,
            implementation=program.implementation,
            shape=shape,
            fallback=mean_rate(program.operands[-1]),
            errors=errors,
            compile_s=program.compile_s,
            saved_bytes=saved[block],
            peak_bytes=memory.peak_bytes(program.step),
        )


def prepare(
    shape: tuple[int, ...],
    recipe: Recipe | None,
    implementation: str | None,
    remat: str = "none",
) -> Program:
    """Compiles a block with random weights and lets its thresholds settle."""
    hidden, intermediate, tokens = shape
    sequence = min(harness.SEQUENCE, tokens // 2)
    keys = jax.random.split(jax.random.key(0), 3)
    x_shape = (tokens // sequence, sequence, hidden)
    x, dy = (data.activation(key, x_shape) for key in keys[:2])
    backend, dot_general = harness.dot_general(recipe, implementation)
    config = harness.config(
        hidden, intermediate, sequence, quantized=recipe is not None, remat=remat
    )
    tables = config.rotary_tables(sequence)
    layer = remat_layer(config)(config, dot_general)
    variables = jax.jit(layer.init)(keys[2], x, tables)
    params = variables.pop("params")

    def forward(params: Any, x: jax.Array, variables: Any) -> tuple[jax.Array, Any]:
        (y, _), variables = layer.apply(
            {"params": params, **variables}, x, tables, mutable=list(variables)
        )
        return y, variables

    def step(params: Any, x: jax.Array, dy: jax.Array, variables: Any) -> Any:
        y, vjp, variables = jax.vjp(
            lambda params, x: forward(params, x, variables), params, x, has_aux=True
        )
        dparams, dx = vjp(dy)
        return y, dx, dparams, variables

    compiled, compile_s, _ = measure.first_call(jax.jit(step), params, x, dy, variables)
    for _ in range(_SETTLING_STEPS if recipe is not None else 0):
        *_, variables = compiled(params, x, dy, variables)
    return Program(
        config,
        backend,
        lambda params, x: forward(params, x, variables)[0],
        compiled,
        (params, x, dy, variables),
        compile_s,
    )
