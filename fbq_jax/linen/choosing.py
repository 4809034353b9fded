"""``choose_recipes`` for Linen models."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from fbq_jax.choice.choosing import BUDGET, CANDIDATES, Rules, checked, choose_for
from fbq_jax.choice.report import ChoiceReport
from fbq_jax.linen import whole_models
from fbq_jax.model_kind import check_linen
from fbq_jax.recipes.schema import Recipe


def choose_recipes(
    model: nn.Module,
    variables: Any,
    *args: Any,
    loss: Callable[[Any], jax.Array],
    candidates: Sequence[str] = CANDIDATES,
    budget: float = BUDGET,
    layers: str = ".*",
    quantize: Callable[..., Any] = whole_models.quantize,
    **kwargs: Any,
) -> tuple[dict[str, Recipe | None], ChoiceReport]:
    """Chooses a recipe for each layer of a model, and says why.

    This takes one gradient of the loss in float, compares each layer's three products
    under every candidate with exact ones, and takes the fastest candidate whose errors
    are inside the budget.  A layer for which there is none, or that is faster in float,
    stays in float.  It compares up to 512 tokens of a product: the block of 128 with
    the largest magnitude, and others evenly spaced.  On a GPU each shape is timed
    once, and the gradient of a step in float and as chosen; elsewhere candidates count
    as fast as their order says.

    Look again during training, when outliers have grown:
    ``report.check(variables, *args)`` warns of layers that have left the budget.

    Args:
      model: an unquantized model, whose layers ``quantize`` takes.
      variables: its parameters and other collections.
      *args: the arguments of ``model.apply``: a batch of training.
      loss: maps the model's output to the loss, a scalar.
      candidates: names of recipes, from fast to slow.
      budget: the largest error of a layer's output, relative to it; its gradients may
        have ten times as much.
      layers: a pattern of paths, as in ``quantize``; other layers stay in float.
      quantize: what will take the rules; ``fbq_jax.contrib.qwix.quantize`` for a model
        whose own code multiplies by its parameters.
      **kwargs: keyword arguments of ``model.apply``, such as ``rngs``.

    Returns:
      The rules for ``quantize``, and the report; ``print`` shows it as a table.

    Raises:
      TypeError: the model is not one of Linen.
      ValueError: no such layer can be quantized, the variables have no parameters,
        activations or gradients are not finite, the loss is no scalar, a candidate is
        no recipe, or the budget is not a positive number.

    >>> import jax.numpy as jnp
    >>> class Classifier(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(8, name="head")(nn.relu(nn.Dense(32, name="up")(x)))
    >>> model, x = Classifier(), jax.random.normal(jax.random.key(0), (64, 16))
    >>> variables = model.init(jax.random.key(1), x)
    >>> rules, report = choose_recipes(model, variables, x, loss=lambda y: (y**2).sum())
    >>> [layer.chosen for layer in report.layers]
    ['block', 'block']
    """
    check_linen("choose_recipes", model)
    if "params" not in variables:
        raise ValueError(
            "choose_recipes takes the variables of a model ({'params': ...}); got the "
            f"collections {sorted(variables)}"
        )
    rngs = {"params": jax.random.key(0), **kwargs.get("rngs", {})}
    options = {name: value for name, value in kwargs.items() if name != "rngs"}

    def make_step(rules: Rules | None) -> Callable[..., Any]:
        run, state = model, {}
        if rules is not None:
            run, _ = quantize(model, rules, rngs, *args, **options)
            state = jax.jit(lambda: run.init(rngs, *args, **options))()

        @jax.jit
        def gradient(variables: Any, state: Any, args: Any) -> tuple[Any, Any]:
            def value(params: Any) -> tuple[jax.Array, Any]:
                found = {**variables, "params": params, "fallback": state}
                moves = DenyList("params")
                y, moved = run.apply(found, *args, mutable=moves, **kwargs)
                return checked(loss(y)), moved.get("fallback", {})

            return jax.grad(value, has_aux=True)(variables["params"])

        state = state.get("fallback", {})

        def step(variables: Any, *args: Any) -> Any:
            nonlocal state
            grads, state = gradient(variables, state, args)
            return grads

        return step

    report = choose_for(make_step, (variables, *args), candidates, budget, layers)
    return report.rules, report
