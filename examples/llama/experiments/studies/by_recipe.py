"""The perplexity and the error of the gradient with the arithmetic of recipes."""

from examples.llama.experiments.studies import gradients, perplexity
from examples.llama.experiments.studies.subject import Subject, cosine_distance
from examples.llama.model import Llama
from fbq_jax import FallbackDot, recipes

RECIPES = (
    *("fallback", "block", "row_block_lhs", "row_block_equalized"),
    *("fp8_row_block_lhs", "fallback_hadamard", "jetfire", "rowwise"),
)
FLOAT = "float32"


def study(subject: Subject) -> dict[str, dict[str, float]]:
    """Measures a model in float32 and with recipes, which round as in training.

    Returns:
        By recipe, and for `FLOAT`: "perplexity", and "gradient", which is 1 - cosine of
        the gradient and the exact one. The threshold of a layer is the quantile of its
        own blocks.
    """
    models = {FLOAT: Llama(subject.config)}
    for name in RECIPES:
        models[name] = Llama(subject.config, FallbackDot(recipes.NAMED[name]))
    tokens = subject.text[0]
    exact = gradients.gradient(models[FLOAT], subject.params, tokens)
    found = {}
    for name, model in models.items():
        gradient = gradients.gradient(model, subject.params, tokens)
        found[name] = {
            "perplexity": perplexity.of_model(subject, model),
            "gradient": float(cosine_distance(exact, gradient)),
        }
    return found
