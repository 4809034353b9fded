"""An optimizer of NNX models that writes the codes of the weights that it changes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from flax.nnx import OptState

from fbq_jax.nnx.dot import KeptCodes, StepCodes
from fbq_jax.nnx.naming import dots_by_path
from fbq_jax.nnx.step_codes import layers_by_dot, make_step_weights
from fbq_jax.optim import code_writer
from fbq_jax.optim.code_writer import CodeWriter


class CodeOptimizer(nnx.Module):
    """``nnx.Optimizer`` that writes codes: the model's layers read no other weights.

    It gives each quantized layer the codes of its weight (``write_codes``), and
    ``update`` writes them when it changes the weight.  A training step neither casts
    nor quantizes a weight::

        optimizer = CodeOptimizer(model, optim.with_codes(optax.adamw(1e-3)), x)

        @nnx.jit
        def step(model, optimizer, x):
            with optimizer.differentiable(model):
                loss, grads = nnx.value_and_grad(loss_fn)(model, x)
            optimizer.update(model, grads)

    Args:
      model: the model.
      writer: an optimizer of ``fbq_jax.optim``.
      *args: the arguments of a call of the model, as of ``quantize_weights_once``.
      wrt: selects the variables that it optimizes, as in ``nnx.Optimizer``; the codes
        of other weights stay.
      **kwargs: keyword arguments of the same call.

    Raises:
      TypeError, ValueError: as ``quantize_weights_once``; or ``wrt`` selects no weight
        that has codes.

    Warns:
      UserWarning: as ``quantize_weights_once``.
    """

    def __init__(
        self,
        model: nnx.Module,
        writer: CodeWriter,
        *args: Any,
        wrt: Any = nnx.Param,
        **kwargs: Any,
    ):
        # Flax calls this in three frames.
        _write_codes(model, args, kwargs, stacklevel=7)
        self.writer, self.wrt = nnx.static(writer), nnx.static(wrt)
        params = nnx.to_pure_dict(nnx.state(model, wrt))
        code_writer.find_weights(_codes_of(model), params)  # checks wrt
        self.opt_state = OptState(writer.init(params))

    @contextlib.contextmanager
    def differentiable(self, model: nnx.Module) -> Iterator[None]:
        """Weights with codes have the dtype of their products in this context.

        Layers read nothing of them but their shape, so the cast costs nothing, and
        gradients in the context have half of the bytes.
        """
        state = nnx.state(model, self.wrt)
        cast = self.writer.differentiable(nnx.to_pure_dict(state), _codes_of(model))
        before = jax.tree.map(lambda x: x, state)
        nnx.update(model, _with_values(state, cast))
        try:
            yield
        finally:
            nnx.update(model, before)

    def update(self, model: nnx.Module, grads: Any) -> None:
        """Changes the parameters, their codes and the state of the optimizer.

        Args:
          model: the model.
          grads: the gradients, as ``nnx.grad`` returns them.
        """
        state, codes = nnx.state(model, self.wrt), _codes_of(model)
        trees = nnx.to_pure_dict(grads), self.opt_state.get_value()
        params, opt_state, codes = self.writer.update(
            *trees, nnx.to_pure_dict(state), codes
        )
        nnx.update(model, _with_values(state, params))
        self.opt_state.set_value(opt_state)
        dots = dots_by_path(model)
        for path, weight in codes.items():
            kept: Any = dots[path].step_codes
            kept.set_value(weight)


def write_codes(model: nnx.Module, *args: Any, **kwargs: Any) -> None:
    """Gives each quantized layer the codes of its weight, which it multiplies by.

    For weights that something else than a ``CodeOptimizer`` has changed, such as those
    of a checkpoint or a moving average, and for weights that never change, as in LoRA.

    Args:
      model: its layers get the codes; nothing else of it changes.
      *args: the arguments of a call of the model, as of ``quantize_weights_once``.
      **kwargs: keyword arguments of the same call.

    Raises:
      TypeError, ValueError: as ``quantize_weights_once``.

    Warns:
      UserWarning: as ``quantize_weights_once``.
    """
    _write_codes(model, args, kwargs, stacklevel=4)


def assert_live(model: nnx.Module) -> None:
    """Raises if codes of a model are of other weights than its own.

    ``fbq_jax.optim.assert_live`` for NNX, for models that have codes from
    ``CodeOptimizer`` or ``write_codes``.

    Raises:
      RuntimeError: codes are of other weights; the message names the parameters.
      ValueError: no layer has codes.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Not(StepCodes)))
    code_writer.assert_live(params, _codes_of(model))


def _write_codes(model: nnx.Module, args: Any, kwargs: Any, stacklevel: int) -> None:
    dots, weights = make_step_weights(model, args, kwargs, stacklevel=stacklevel)
    # A kernel that layers share has one path.
    names = {id(value): path for path, value in nnx.iter_graph(model)}
    layers = layers_by_dot(model)
    for path, weight in weights.items():
        dot = dots[path]
        parameter = names[id(layers[id(dot)].kernel)]
        kept = dataclasses.replace(weight, parameter=parameter)
        dot.step_codes = nnx.data(KeptCodes(kept))


def _codes_of(model: nnx.Module) -> dict[str, Any]:
    return {
        path: dot.step_codes.get_value()
        for path, dot in dots_by_path(model).items()
        if isinstance(dot.step_codes, KeptCodes)
    }


def _with_values(state: Any, values: Any) -> Any:
    new = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(new, values)
    return new
