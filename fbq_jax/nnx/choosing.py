"""``choose_recipes`` for NNX models."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from fbq_jax.choice.choosing import BUDGET, CANDIDATES, choose_for
from fbq_jax.choice.report import ChoiceReport
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.rules import quantize
from fbq_jax.recipes import rowwise
from fbq_jax.recipes.schema import Recipe


def choose_recipes(
    model: nnx.Module,
    *args: Any,
    loss: Callable[[Any], jax.Array],
    candidates: Sequence[str] = CANDIDATES,
    budget: float = BUDGET,
    **kwargs: Any,
) -> tuple[dict[str, Recipe | None], ChoiceReport]:
    """Chooses a recipe for each layer of a model; see ``fbq_jax.choose_recipes``.

    Args:
      model: an unquantized model, which does not change.
      *args: the arguments of its call: a batch of training.
      loss: maps the model's output to the loss, a scalar.
      candidates: as there.
      budget: as there.
      **kwargs: keyword arguments of the call.

    Returns:
      The rules for ``fbq_jax.nnx.quantize``, and the report.

    Raises:
      TypeError: the model is not one of NNX.
      ValueError: as there.
    """
    check_nnx("choose_recipes", model)
    quantized = nnx.clone(model)
    quantize(quantized, {".*": rowwise}, *args, **kwargs)

    def step_of(model: nnx.Module) -> Callable[[], Any]:
        split: Any = nnx.split(model, nnx.Param, ...)
        graphdef, params, others = split

        @jax.jit
        def gradient(params: Any, others: Any) -> Any:
            def of(params: Any) -> jax.Array:
                merged = nnx.merge(graphdef, params, others, copy=True)
                return loss(merged(*args, **kwargs))

            return jax.grad(of)(params)

        return lambda: gradient(params, others)

    report = choose_for(step_of(quantized), step_of(model), candidates, budget)
    return report.rules, report
