"""An optimizer of NNX models that writes the codes of the weights that it changes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from flax.nnx import OptState

from fbq_jax.nnx.dot import KeptCodes, Layer, dot_of, layer_op
from fbq_jax.nnx.naming import dots_by_path
from fbq_jax.nnx.step_codes import find_weights
from fbq_jax.optim.code_writer import CodeWriter

KERNEL = "kernel"


class CodeOptimizer(nnx.Module):
    """``nnx.Optimizer`` that writes codes: the model's layers read no other weights.

    It gives each quantized layer the codes of its weight, which ``update`` writes when
    it changes the weight.  A training step neither casts nor quantizes a weight::

        optimizer = CodeOptimizer(model, optim.with_codes(optax.adamw(1e-3)), x)

        @nnx.jit
        def step(model, optimizer, x):
            with optimizer.differentiable(model):
                loss, grads = nnx.value_and_grad(loss_fn)(model, x)
            optimizer.update(model, grads)

    Args:
      model: the model whose ``nnx.Param`` it optimizes.
      writer: an optimizer of ``fbq_jax.optim``.
      *args: the arguments of a call of the model, as of ``quantize_weights_once``.
      **kwargs: keyword arguments of the same call.

    Raises:
      TypeError, ValueError: as ``quantize_weights_once``.

    Warns:
      UserWarning: as ``quantize_weights_once``.
    """

    def __init__(
        self, model: nnx.Module, writer: CodeWriter, *args: Any, **kwargs: Any
    ):
        dots, weights = find_weights(model, args, kwargs, stacklevel=4)
        kernels = {
            id(dot_of(getattr(module, layer_op(module).name))): (*path, KERNEL)
            for path, module in nnx.iter_modules(model)
            if isinstance(module, Layer)
        }
        for path, weight in weights.items():
            dot = dots[path]
            kept = dataclasses.replace(weight, parameter=kernels[id(dot)])
            dot.step_codes = nnx.data(KeptCodes(kept))
        self.writer = nnx.static(writer)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        self.opt_state = OptState(writer.init(params))

    @contextlib.contextmanager
    def differentiable(self, model: nnx.Module) -> Iterator[None]:
        """Weights with codes have the dtype of their products in this context.

        Layers read nothing of them but their shape, so the cast costs nothing, and
        gradients in the context have half of the bytes.
        """
        state = nnx.state(model, nnx.Param)
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
        state, codes = nnx.state(model, nnx.Param), _codes_of(model)
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
