"""Studies of quantization errors in the matrix products of a trained model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from experiments import result_files, runs
from experiments.settings import Experiment
from experiments.studies import of_inputs, of_models
from experiments.studies.subject import Subject, load


@dataclass(frozen=True)
class Curves:
    """How the curves that a study measures of each model are shown."""

    x: Sequence[float]
    xlabel: str
    ylabel: str = "1 - cosine of the gradient"
    key: str | None = None  # the entry with the curves; all of it by default
    names: tuple[str, ...] = ()  # those to show; all by default
    form: str = ".1e"  # of the values

    def of(self, found: Any) -> dict[str, list[float]]:
        """Returns the curves to show by name, from what was measured of a model."""
        curves = found if self.key is None else found[self.key]
        if isinstance(curves, list):
            curves = {"": curves}
        return {
            name: values if isinstance(values, list) else [values] * len(self.x)
            for name, values in curves.items()
            if name in (self.names or curves)
        }


STUDIES: dict[str, Callable[[Subject], Any]] = {
    "error": of_inputs.error,
    "criteria": of_inputs.criteria,
    "operands": of_models.operands,
    "passes": of_models.passes,
    "nonlinear": of_models.nonlinear,
    "perplexity": of_models.perplexity,
    "recipes": of_models.by_recipe,
    "blocks": of_inputs.blocks,
}

CURVES = {
    "error": Curves(of_inputs.BITS, "bits", "relative rms error of a token", "down"),
    "criteria": Curves(
        of_inputs.RATES, "fallback rate", "1 - cosine of down's output", "down"
    ),
    "operands": Curves(of_models.BITS, "bits"),
    "passes": Curves(of_models.RATES, "fallback rate", names=of_models.PASSES),
    "nonlinear": Curves(of_models.SAVED_BITS, "bits saved per value"),
    "perplexity": Curves(of_models.BLOCK_SIDES, "block size", "perplexity", form=".6g"),
}


def run(name: str, experiment: Experiment) -> None:
    """Runs a study on all models and writes `studies/<name>.json`."""
    models = experiment.settings.models
    # A GPU multiplies float32 with 10 bits by default.
    with jax.default_matmul_precision("highest"):
        found = {model: STUDIES[name](load(experiment, model)) for model in models}
    weights = {model: runs.weights(experiment.model(model)) for model in models}
    result = {"machine": runs.machine(), "weights": weights, "found": found}
    result_files.save(result, experiment.results / "studies" / f"{name}.json")
