"""``choose_recipes`` for Linen models."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from fbq_jax.choice.choosing import BUDGET, CANDIDATES, choose_for
from fbq_jax.choice.report import ChoiceReport
from fbq_jax.linen.whole_models import quantize
from fbq_jax.model_kind import check_linen
from fbq_jax.recipes import rowwise
from fbq_jax.recipes.schema import Recipe


def choose_recipes(
    model: nn.Module,
    variables: Any,
    *args: Any,
    loss: Callable[[Any], jax.Array],
    candidates: Sequence[str] = CANDIDATES,
    budget: float = BUDGET,
    **kwargs: Any,
) -> tuple[dict[str, Recipe | None], ChoiceReport]:
    """Chooses a recipe for each layer of a model, and says why.

    This takes one gradient of the loss in float, compares each layer's three products
    under every candidate with exact ones, and takes the fastest candidate whose errors
    are inside the budget.  A layer for which there is none, or that is faster in float,
    stays in float.  On a GPU each shape is timed once; elsewhere candidates count as
    fast as their order says.  Choose again during training, when outliers have grown,
    and see ``ChoiceReport.warn_of_changes``.

    Args:
      model: an unquantized model, whose layers ``quantize`` takes.
      variables: its parameters and other collections.
      *args: the arguments of ``model.apply``: a batch of training.
      loss: maps the model's output to the loss, a scalar.
      candidates: names of recipes, from fast to accurate.
      budget: the largest error of a layer's output, relative to it; its gradients may
        have ten times as much.
      **kwargs: keyword arguments of ``model.apply``, such as ``rngs``.

    Returns:
      The rules for ``quantize``, and the report; ``print`` shows it as a table.

    Raises:
      TypeError: the model is not one of Linen.
      ValueError: no layer can be quantized, a candidate is no recipe, or the budget is
        not a positive number.

    >>> import jax.numpy as jnp
    >>> class Classifier(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(8, name="head")(nn.relu(nn.Dense(32, name="up")(x)))
    >>> model, x = Classifier(), jax.random.normal(jax.random.key(0), (64, 16))
    >>> variables = model.init(jax.random.key(1), x)
    >>> square = lambda y: jnp.mean(y**2)
    >>> rules, report = choose_recipes(model, variables, x, loss=square)
    >>> [layer.chosen for layer in report.layers]
    ['block', 'block']
    """
    check_linen("choose_recipes", model)
    call = {name: value for name, value in kwargs.items() if name != "rngs"}
    rngs = kwargs.get("rngs", {"params": jax.random.key(0)})
    rngs = {"params": jax.random.key(0), **rngs}
    quantized, _ = quantize(model, {".*": rowwise}, rngs, *args, **call)

    def step_of(model: nn.Module) -> Callable[[], Any]:
        @jax.jit
        def gradient(params: Any, others: Any) -> Any:
            def of(params: Any) -> jax.Array:
                return loss(model.apply({"params": params, **others}, *args, **kwargs))

            return jax.grad(of)(params)

        others = {name: x for name, x in variables.items() if name != "params"}
        return lambda: gradient(variables["params"], others)

    report = choose_for(step_of(quantized), step_of(model), candidates, budget)
    return report.rules, report
