"""What ``freeze`` asks of a model, in Linen and in NNX."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fbq_jax.core.tracing import OUTPUTS, find_dependents, find_readers, trace


def find_kept_parameters(
    call: Callable[[dict[str, Any], Any, Any], Any],
    layers: Mapping[str, str],
    own_code: Collection[str],
    parameters: dict[str, Any],
    others: Any,
    inputs: Any,
) -> set[str]:
    """The parameters that stay beside their codes, because own code reads them, too.

    Args:
      call: takes the last three arguments and returns the model's outputs.
      layers: maps the layers to freeze to the paths of their parameters.
      own_code: the layers whose parameter the model's own code multiplies by.
      parameters: the values of these parameters, by their paths.
      others: the model's other variables.
      inputs: the arguments of its call.

    Raises:
      ValueError: the weight of a layer depends on the inputs, or something else reads
        the kernel of a layer.
    """
    fixed = parameters, others
    dependents = find_dependents(
        lambda inputs, fixed: call(fixed[0], fixed[1], inputs), inputs, fixed, layers
    )
    if changing := dependents - {OUTPUTS}:
        raise ValueError(
            f"freeze cannot quantize the weights of {', '.join(sorted(changing))} "
            "once: they depend on the model's inputs. Fold the factor into the "
            "parameter, or give the layer None in the rules"
        )
    read = find_readers(
        lambda values, fixed: call(values, fixed[0], fixed[1]),
        parameters,
        (others, inputs),
        layers,
    )
    for layer, parameter in layers.items():
        if parameter in read and layer not in own_code:
            raise ValueError(
                f"freeze would remove {parameter!r}, which the model reads other than "
                f"by the product of layer {layer!r}: give the layer None in the rules"
            )
    return set(read)


def check_runs(call: Callable[[], Any]) -> None:
    """Raises ValueError if a call of a frozen model, which is traced, fails."""
    try:
        trace(call)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            "the frozen model does not run: it reads a layer's kernel other than by "
            "multiplying by it with the layer's op. Give that layer None in the rules"
        ) from error
