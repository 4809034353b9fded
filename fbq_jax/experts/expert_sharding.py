"""The mesh axes over which the experts of a mixture are sharded."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fbq_jax.sharding.assignment import MeshAxes


@dataclasses.dataclass(frozen=True)
class ExpertSharding:
    """The mesh axes of a mixture of experts (expert parallelism).

    Experts are sharded over ``experts``.  Tokens are sharded over ``copies`` and
    ``experts``, in this order.  ``jax.set_mesh`` sets the mesh.

    Attributes:
      experts: the mesh axis, or axes, with different experts.
      copies: the axes with different tokens but copies of the experts, as in data
        parallelism.

    Raises:
      TypeError: axes are not names.
      ValueError: there is no axis of experts, or an axis occurs twice.

    >>> ExpertSharding("expert", copies="data")
    ExpertSharding(experts=('expert',), copies=('data',))
    """

    experts: str | MeshAxes
    copies: str | MeshAxes = ()

    def __post_init__(self) -> None:
        for name in ("experts", "copies"):
            axes = getattr(self, name)
            axes = (axes,) if isinstance(axes, str) else axes
            if not (
                isinstance(axes, tuple | list)
                and all(isinstance(axis, str) for axis in axes)
            ):
                raise TypeError(
                    f"ExpertSharding takes the names of mesh axes as {name}; got "
                    f"{axes!r}"
                )
            object.__setattr__(self, name, tuple(axes))
        if not self.experts or len({*self.axes}) < len(self.axes):
            raise ValueError(
                "ExpertSharding takes at least one axis of experts, and each axis "
                f"once; got {self}"
            )

    @property
    def axes(self) -> MeshAxes:
        """The axes that tokens are sharded over."""
        return (*self.copies, *self.experts)

    def mesh(self) -> AbstractMesh:
        """The mesh of ``jax.set_mesh``.

        Raises:
          ValueError: it lacks an axis, or an axis is explicit or manual.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not _has_automatic(mesh, self.axes):
            raise ValueError(
                f"experts are sharded over the mesh axes {self.axes}, which takes a "
                "mesh with these axes, of type AxisType.Auto, set by jax.set_mesh; got "
                f"{mesh}"
            )
        return mesh

    def sharded(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """An initializer of kernels ``[E, K, N]`` that shards them over ``experts``.

        A kernel that ``init`` boxes has its own sharding.  Without a mesh of
        ``jax.set_mesh`` kernels stay as they are.
        """

        @functools.wraps(init)
        def init_sharded(*args: Any) -> Any:
            kernel, mesh = init(*args), jax.sharding.get_abstract_mesh()
            has_axes = _has_automatic(mesh, tuple(self.experts))
            if not has_axes or not isinstance(kernel, jax.Array):
                return kernel
            spec = P(self.experts, P.UNCONSTRAINED, P.UNCONSTRAINED)
            return lax.with_sharding_constraint(kernel, spec)

        return init_sharded


def check_expert_sharding(sharding: object) -> None:
    """Raises TypeError unless ``sharding`` is an ``ExpertSharding`` or None."""
    if not isinstance(sharding, ExpertSharding | None):
        raise TypeError(
            "a mixture of experts takes an ExpertSharding, such as "
            "ExpertSharding('expert', copies='data'), or None as expert_sharding; got "
            f"{sharding!r}"
        )


def _has_automatic(mesh: AbstractMesh, axes: MeshAxes) -> bool:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return all(types.get(axis) == AxisType.Auto for axis in axes)
