"""One Llama block, forward and backward, in bf16 and by each recipe.

The block is that of ``examples/llama``: attention and SwiGLU, each after an RMSNorm.
Quantized, it saves INT10 for its non-linear layers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from fbq_jax.bench import data, llama, measure, memory
from fbq_jax.bench.contenders import forward_by
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.recipes.schema import Recipe

# (hidden, intermediate, tokens)
SHAPES = tuple(
    (*sizes, tokens)
    for tokens in (16384, 8192)
    for sizes in ((4096, 14336), (2048, 5632), (8192, 28672))
)
# Beside the recipes, at the first shape: what is recomputed in the backward pass.
REMATS = (("bf16", "full"), ("fallback", "codes"), ("fallback", "full"))
SEQUENCE = 2048  # tokens
_LOSS = 0.2  # what INT8 may lose against bf16, in a gradient of random weights
_SETTLING_STEPS = 4  # until the thresholds belong to these operands


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures each ``(hidden, intermediate, tokens)``, in sequences of 2048 tokens.

    The work counted is that of the matrix products and of causal attention.

    Raises:
      WrongResultError: if an output or gradient differs from bf16's by more than INT8
        loses.
    """
    # A burst keeps all its results, gradients of all weights.
    effort = effort._replace(launches=min(effort.launches, 5))
    saved: dict[tuple[Any, ...], float] = {}  # a token: the same for more of them
    for shape in shapes:
        hidden, intermediate, tokens = shape
        baseline: Row | None = None
        exact: tuple[jax.Array, ...] = ()
        recipes = llama.recipes()
        contenders = [(name, "none") for name in recipes]
        if shape == shapes[0]:
            contenders += REMATS
        for name, remat in contenders:
            program = prepare(shape, recipes[name], implementation, remat)
            params, x, _, variables = program.operands
            y_and_dx = program.step(*program.operands)[:2]
            exact = exact or y_and_dx
            errors = dict(
                zip(
                    ("y", "dx"),
                    map(measure.relative_error, y_and_dx, exact),
                    strict=True,
                )
            )
            what = name if remat == "none" else f"{name}, remat {remat}"
            for array, error in errors.items():
                measure.require(error, _LOSS, f"{array} of {what} at {shape}")
            block = what, hidden, intermediate
            if block not in saved:
                bytes_a_row = memory.saved_bytes(program.output, params, x)
                saved[block] = bytes_a_row / x.shape[1]
            measured = row(
                measure.timing(program.step, *program.operands, effort=effort),
                llama.work(program.config, tokens),
                baseline,
                what=what,
                implementation=program.by,
                shape=shape,
                fallback=mean_rate(variables),
                errors=errors,
                compile_s=program.compile_s,
                saved_bytes=saved[block],
                peak_bytes=memory.peak_bytes(program.step),
            )
            baseline = baseline or measured
            yield measured


class Program(NamedTuple):
    """A compiled block.

    Attributes:
      config: of the block.
      by: what multiplies.
      output: ``(params, x) -> y``, to be differentiated.
      step: compiled ``(params, x, dy, variables) -> (y, dx, dparams, variables)``.
      operands: of the step.
      compile_s: seconds of its first call.
    """

    config: Any
    by: str
    output: Callable[[Any, jax.Array], jax.Array]
    step: Any
    operands: tuple[Any, jax.Array, jax.Array, Any]
    compile_s: float


def prepare(
    shape: tuple[int, ...],
    recipe: Recipe | None,
    implementation: str | None,
    remat: str = "none",
) -> Program:
    """Compiles a block of random weights, and lets its thresholds settle."""
    hidden, intermediate, tokens = shape
    sequence = min(SEQUENCE, tokens // 2)
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (
        data.activation(key, (tokens // sequence, sequence, hidden)) for key in keys[:2]
    )
    by, dot_general = choose(recipe, implementation)
    config = llama.config(
        hidden, intermediate, sequence, quantized=recipe is not None, remat=remat
    )
    layer, tables = llama.layer(config, dot_general)
    variables = jax.jit(layer.init)(keys[2], x, tables)
    params = variables.pop("params")

    def forward(params: Any, x: jax.Array, variables: Any) -> tuple[jax.Array, Any]:
        (y, _), variables = layer.apply(
            {"params": params, **variables}, x, tables, mutable=list(variables)
        )
        return y, variables

    def step(
        params: Any, x: jax.Array, dy: jax.Array, variables: Any
    ) -> tuple[Any, ...]:
        y, vjp, variables = jax.vjp(
            lambda params, x: forward(params, x, variables), params, x, has_aux=True
        )
        dparams, dx = vjp(dy)
        return y, dx, dparams, variables

    compiled, compile_s = measure.first_call(step, params, x, dy, variables)
    for _ in range(_SETTLING_STEPS if recipe is not None else 0):
        *_, variables = compiled(params, x, dy, variables)
    return Program(
        config,
        by,
        lambda params, x: forward(params, x, variables)[0],
        compiled,
        (params, x, dy, variables),
        compile_s,
    )


def choose(recipe: Recipe | None, implementation: str | None) -> tuple[str, Any]:
    """What multiplies by a recipe, or by none, and the ``dot_general`` for it."""
    if recipe is None:
        return "xla", None
    by = forward_by(recipe, implementation)
    return by, FallbackDot(recipe, implementation=implementation)
