"""``choose_recipes``, for models of any kind."""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.choice.products import (
    DIMENSIONS,
    Product,
    Recorder,
    errors,
    gradients,
    outliers,
)
from fbq_jax.choice.report import Candidate, ChoiceReport, LayerReceipt
from fbq_jax.core.dot_general import dot_general
from fbq_jax.kernels.speed_map import Sizes
from fbq_jax.recipes import NAMED
from fbq_jax.recipes.schema import Recipe

#: From fast to slow, as measured on an H200.
CANDIDATES = ("block", "row_block_lhs", "fallback")
#: The largest error of a layer's output: twice what scales per block do to Gaussian
#: operands.
BUDGET = 0.03
_ROWS = 512  # of an activation that are compared
_CALLS = 8  # of a layer that is timed, one after the other
_SETTLING_STEPS = 4  # of thresholds
_SECONDS = 0.5  # that steps are timed
_THREADS = 8  # that compile
_NOT_FINITE = "its values, or their gradients, are not finite"
Rules = Mapping[str, Recipe | None]


def choose_for(
    make_step: Callable[[Rules | None], Callable[..., Any]],
    arguments: tuple[Any, ...],
    candidates: Sequence[str],
    budget: float,
    layers: str,
) -> ChoiceReport:
    """Chooses recipes for the layers of a model, as ``fbq_jax.choose_recipes`` says.

    Args:
      make_step: takes rules, or None for the model in float, and makes a function of
        the arguments that takes a gradient by the model with these rules.
      arguments: as ``ChoiceReport.check`` takes them.
      candidates: as in ``fbq_jax.choose_recipes``.
      budget: as there.
      layers: as there.
    """
    _check(candidates, budget)
    leaves = jax.tree.leaves(arguments)
    if any(isinstance(x, jax.Array) and len(x.devices()) > 1 for x in leaves):
        raise ValueError(
            "choose_recipes takes arrays on one device: jax.device_get them, or choose "
            "for a smaller model with the same layers"
        )
    recorder, step = Recorder(_ROWS), make_step({layers: NAMED["rowwise"]})

    def look(*arguments: Any) -> ChoiceReport:
        products = recorder.record(lambda: step(*arguments))
        return choose_from(products, candidates=candidates, budget=budget)

    report = dataclasses.replace(look(*arguments), look=look)
    if unfit := [x.layer for x in report.layers if x.reason == _NOT_FINITE]:
        raise ValueError(
            "choose_recipes takes parameters and a batch whose activations and "
            f"gradients are finite; those of {', '.join(unfit)} are not"
        )
    if all(layer.float_ms is None for layer in report.layers):
        return report
    steps = [make_step(rules) for rules in (None, report.rules)]
    times = [milliseconds(functools.partial(step, *arguments)) for step in steps]
    return dataclasses.replace(report, float_ms=times[0], chosen_ms=times[1])


def choose_from(
    products: Mapping[str, Sequence[Product]],
    *,
    candidates: Sequence[str] = CANDIDATES,
    budget: float = BUDGET,
) -> ChoiceReport:
    """Chooses recipes by the recorded products of each layer, by its path.

    The other arguments, and errors, are as in ``fbq_jax.choose_recipes``.
    """
    _check(candidates, budget)
    if not products:
        raise ValueError(
            "choose_recipes found no product with a gradient in a layer that matches "
            "the pattern `layers`. Does the loss depend on the layers? Products in a "
            "model's own code need quantize=fbq_jax.contrib.qwix.quantize, or "
            "quantize_nnx"
        )
    layers, recipes = [], tuple(NAMED[name] for name in candidates)
    with ThreadPoolExecutor(_THREADS) as pool:  # of layers with other shapes
        compare = functools.partial(_errors, recipes=recipes)
        compared = list(pool.map(compare, products.values()))
    if jax.default_backend() == "gpu":
        timed = map(_timed, itertools.chain.from_iterable(products.values()))
        _compile(set(timed), candidates)
    for (layer, found), each in zip(products.items(), compared, strict=True):
        times = [layer_ms(*_timed(product), tuple(candidates)) for product in found]
        ms = {name: statistics.fmean(t[name] for t in times) for name in times[0]}
        measured = []
        for name, of_each in zip(candidates, zip(*each, strict=True), strict=True):
            y, dx, dw = (float(x) for x in np.max(np.asarray(of_each), axis=0))
            measured.append(Candidate(name, y, dx, dw, ms.get(name)))
        largest, share = max(tuple(map(float, outliers(x.x))) for x in found)
        sizes = tuple(sorted(product.sizes for product in found))
        what = layer, sizes, largest, share, tuple(measured)
        chosen = _choose(measured, budget, ms.get("float"))
        layers.append(LayerReceipt(*what, *chosen, ms.get("float")))
    return ChoiceReport(tuple(layers), budget, jax.devices()[0].device_kind)


def checked(loss: Any) -> jax.Array:
    """A loss; raises a ValueError if it is no scalar."""
    shapes = jax.tree.map(jnp.shape, loss)
    if shapes != ():
        raise ValueError(f"loss returns a scalar; got the shape {shapes}")
    return jnp.asarray(loss)


def _errors(
    products: Sequence[Product], recipes: tuple[Recipe, ...]
) -> list[list[list[jax.Array]]]:
    return [errors(*product[:3], recipes) for product in products]


def _compile(timed: Iterable[tuple[Sizes, str]], candidates: Sequence[str]) -> None:
    """Compiles all programs that ``layer_ms`` times."""
    for of in timed:  # alone, because XLA times the kernels of products in float
        layer_program(*of, "float")
    with ThreadPoolExecutor(_THREADS) as pool:
        pairs = itertools.product(timed, candidates)
        list(pool.map(lambda pair: layer_program(*pair[0], pair[1]), pairs))


def _timed(product: Product) -> tuple[Sizes, str]:
    """What the time of a product depends on: its sizes and the dtype."""
    return product.sizes, jnp.result_type(product.x, product.w).name


def _check(candidates: Sequence[str], budget: float) -> None:
    """Raises a ValueError for candidates that are no recipes, or a bad budget."""
    if isinstance(candidates, str) or not candidates:
        raise ValueError(f"candidates takes a list of names; got {candidates!r}")
    if unknown := [name for name in candidates if name not in NAMED]:
        names = ", ".join(NAMED)
        raise ValueError(
            f"candidates takes a list of names, some of {names}; got {unknown[0]!r}"
        )
    if not (isinstance(budget, float | int) and 0 < budget < math.inf):
        raise ValueError(f"budget takes a finite number above 0; got {budget!r}")


def _choose(
    candidates: Sequence[Candidate], budget: float, float_ms: float | None
) -> tuple[str | None, str]:
    """The fastest candidate inside the budget, or None, and the reason.

    Where times are not measured, candidates are as fast as their order says.
    """
    if all(math.isnan(c.error) for c in candidates):
        return None, _NOT_FINITE
    inside = [c for c in candidates if c.error <= budget]
    if not inside:
        least = min(candidates, key=lambda c: c.error)
        return None, f"no candidate is inside: {least.recipe} has {least.error:.3f}"
    best = min(inside, key=lambda c: c.ms or 0.0)
    if best.ms is not None and float_ms is not None and best.ms >= float_ms:
        return None, f"{best.ms:.3f} ms with {best.recipe}, {float_ms:.3f} ms in float"
    reason = f"error {best.error:.3f}"
    if worse := [f"{c.recipe} {c.error:.3f}" for c in candidates if c not in inside]:
        reason += f"; above the budget: {', '.join(worse)}"
    return best.recipe, reason


@functools.cache
def layer_ms(sizes: Sizes, dtype: str, names: Sequence[str]) -> Mapping[str, float]:
    """Milliseconds of a layer's products, and of an update of W, by recipe.

    The name of products in float is ``"float"``.  Without a GPU, where INT8 is not
    faster, nothing is measured.
    """
    if jax.default_backend() != "gpu":
        return {}
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, _shapes(sizes), strict=True)
    )
    w /= sizes[1] ** 0.5
    found = {}
    for name in ("float", *names):
        threshold, run = layer_program(sizes, dtype, name)
        step = functools.partial(run, threshold(x, w), x, w, dy)
        found[name] = milliseconds(step) / _CALLS
    return found


@functools.cache
def layer_program(
    sizes: Sizes, dtype: str, name: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiles what ``layer_ms`` times: a threshold of X, and several calls."""
    recipe = NAMED.get(name)

    def threshold(x: jax.Array, w: jax.Array) -> jax.Array | None:
        if recipe is None or recipe.criterion is None:
            return None
        options: Any = {"recipe": recipe, "key": jax.random.key(0)}
        return dot_general(x, w, DIMENSIONS, **options)[1].theta

    def run(theta: jax.Array | None, *state: jax.Array) -> Any:
        def step(state: Any, _: Any) -> tuple[Any, None]:
            x, w, dy = state
            y, dx, dw = gradients(recipe, x, w, dy, theta)
            return (dx, w - 1e-6 * dw, y), None

        return jax.lax.scan(step, state, length=_CALLS)[0]

    state = [jax.ShapeDtypeStruct(shape, dtype) for shape in _shapes(sizes)]
    first = jax.jit(threshold).lower(*state[:2]).compile()
    theta = jax.eval_shape(threshold, *state[:2])
    return first, jax.jit(run).lower(theta, *state).compile()


def _shapes(sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """The shapes of X, W and dY."""
    M, K, N = sizes
    return (1, M, K), (1, K, N), (1, M, N)


def milliseconds(step: Callable[[], Any]) -> float:
    """Milliseconds of a step, when thresholds have settled."""
    for _ in range(_SETTLING_STEPS):
        jax.block_until_ready(step())
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + _SECONDS:
        for _ in range(_CALLS):
            out = step()
        jax.block_until_ready(out)
        count += _CALLS
    return 1e3 * (time.perf_counter() - start) / count
