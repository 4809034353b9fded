"""``choose_recipes`` for NNX models."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from fbq_jax.choice.choosing import BUDGET, CANDIDATES, Rules, checked, choose_for
from fbq_jax.choice.report import ChoiceReport
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx import rules as nnx_rules
from fbq_jax.recipes.schema import Recipe


def choose_recipes(
    model: nnx.Module,
    *args: Any,
    loss: Callable[[Any], jax.Array],
    candidates: Sequence[str] = CANDIDATES,
    budget: float = BUDGET,
    layers: str = ".*",
    quantize: Callable[..., Any] = nnx_rules.quantize,
    **kwargs: Any,
) -> tuple[dict[str, Recipe | None], ChoiceReport]:
    """Chooses a recipe for each layer of a model, and says why.

    This is ``fbq_jax.choose_recipes`` for an unquantized model, which does not change.
    The other arguments are those of its call; ``report.check(model, *args)`` looks
    again.  Returns the rules for ``quantize``, and the report.  If the model's own code
    multiplies by its parameters, ``quantize`` is
    ``fbq_jax.contrib.qwix.quantize_nnx``.
    """
    check_nnx("choose_recipes", model)

    def make_step(rules: Rules | None) -> Callable[..., Any]:
        run = nnx.clone(model)
        if rules is not None:
            made = quantize(run, rules, *args, **kwargs)
            run = made[0] if isinstance(made, tuple) else run
        parts: Any = nnx.split(run, nnx.Param, ...)
        graph, _, state = parts

        @jax.jit
        def gradient(params: Any, state: Any, args: Any) -> tuple[Any, Any]:
            def value(params: Any) -> tuple[jax.Array, Any]:
                merged = nnx.merge(graph, params, state, copy=True)
                y = merged(*args, **kwargs)
                return checked(loss(y)), nnx.state(merged, nnx.Not(nnx.Param))

            return jax.grad(value, has_aux=True)(params)

        def step(model: nnx.Module, *args: Any) -> Any:
            nonlocal state
            grads, state = gradient(nnx.state(model, nnx.Param), state, args)
            return grads

        return step

    report = choose_for(make_step, (model, *args), candidates, budget, layers)
    return report.rules, report
