"""Several devices: which there are, and what of a run each of them holds.

A mesh has up to three axes. Over "data" and "fsdp" the sequences of a batch are cut;
over "fsdp" also the parameters, their gradients and the optimizer's moments: a layer
then fetches what it multiplies by, as INT8 codes. Over "tensor" each layer's heads and
the width of its MLP are cut. The names below decide it; XLA does the rest.
"""

import argparse
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

AXES = ("data", "fsdp", "tensor")

# What the axes of parameters are, by the end of the parameter's path; the layers of
# `nn.scan` come before them. Other parameters are small and whole on each device.
PARAMETERS: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("embed", "embedding"): ("vocab", "embed"),
    ("dense", "kernel"): ("embed", "heads"),
    ("dense", "bias"): ("heads",),
    ("out", "kernel"): ("heads", "embed"),
    ("gate_up", "kernel"): ("embed", None, "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
    ("lm_head", "kernel"): ("embed", "vocab"),
}
RULES = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}

# The options that say what there is to run on.
PARSER = argparse.ArgumentParser(add_help=False)
PARSER.add_argument(
    "--mesh",
    default="",
    help="devices along each axis, such as data=2,fsdp=2,tensor=2 (any of them)",
)
PARSER.add_argument(
    "--hosts",
    nargs="?",
    const="",
    metavar="ADDRESS,N,I",
    help="be process I of N, which meet at ADDRESS (host:port of the first one); on a "
    "cluster that JAX knows, such as Slurm's, all three can be left out",
)


class MeshError(ValueError):
    """There is no such mesh here."""


def join(argv: Sequence[str]) -> None:
    """Meets the other processes, if `argv` says so, before JAX looks for devices.

    Raises:
        MeshError: --hosts is not as it should be.
    """
    hosts = PARSER.parse_known_args(argv)[0].hosts
    if hosts is None:
        return
    if not hosts:
        jax.distributed.initialize()
        return
    try:
        address, count, index = hosts.split(",")
        jax.distributed.initialize(address, int(count), int(index))
    except ValueError as error:
        raise MeshError(
            f"hosts takes host:port, a number of processes and which of them this is, "
            f"such as 10.0.0.1:1234,2,0; got {hosts!r} ({error})"
        ) from error


def make(text: str) -> Mesh | None:
    """The mesh that --mesh asks for; None for one device.

    Raises:
        MeshError: An axis is unknown or no number, or there are not so many devices.
    """
    if not text:
        if jax.process_count() > 1:
            raise MeshError("several processes need a --mesh over all of their devices")
        return None
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or not int(size):
            raise MeshError(
                f"mesh takes sizes for {', '.join(AXES)}, such as data=2,fsdp=4; got "
                f"{text!r}"
            )
        sizes[name] = int(size)
    needed, devices = int(np.prod(list(sizes.values()))), jax.devices()
    if needed > len(devices) or (jax.process_count() > 1 and needed < len(devices)):
        raise MeshError(f"mesh {text} is of {needed} devices; there are {len(devices)}")
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:needed],
    )


def use(devices: Mesh | None) -> AbstractContextManager[Any]:
    """Has what follows run on a mesh, or on one device."""
    return nullcontext() if devices is None else jax.set_mesh(devices)


def spec(shape: Sequence[int], names: Sequence[str | None]) -> PartitionSpec:
    """How an array with axes of these names is cut over the mesh in use.

    An axis that its devices do not divide is left whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    cuts: list[tuple[str, ...] | None] = []
    for size, name in zip(shape, names, strict=True):
        over = tuple(axis for axis in RULES.get(name or "", ()) if axis in mesh.shape)
        number = int(np.prod([mesh.shape[axis] for axis in over]))
        cuts.append(over if over and size % number == 0 else None)
    return PartitionSpec(*cuts)


def specs(state: Any) -> Any:
    """How each array of a training state, or of its shape, is cut."""

    def of(path: Sequence[Any], array: Any) -> PartitionSpec:
        end: Any = tuple(getattr(key, "key", None) for key in path[-2:])
        names = PARAMETERS.get(end, ())
        return spec(array.shape, (None,) * (array.ndim - len(names)) + names)

    return jax.tree.map_with_path(of, state)


def shardings(state: Any) -> Any:
    """Where each array of a training state is: on the mesh in use, or one device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        one_device = SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: one_device, state)
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs(state))


def constrain(x: Any, *names: str | None) -> Any:
    """Cuts an array as its axes' names say; without names, a training state."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    cut = spec(x.shape, names) if names else specs(x)
    return jax.lax.with_sharding_constraint(x, cut)


def distribute(tokens: np.ndarray, *names: str | None) -> Any:
    """Puts a batch that every process has on the devices, each its part."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return tokens
    sharding = NamedSharding(mesh, spec(tokens.shape, names))
    return jax.make_array_from_callback(tokens.shape, sharding, lambda i: tokens[i])


def size() -> int:
    """The number of devices in use."""
    return max(1, jax.sharding.get_abstract_mesh().size)


def check_batch(sequences: int) -> None:
    """Raises MeshError unless the mesh in use divides a batch."""
    mesh = jax.sharding.get_abstract_mesh()
    number = int(np.prod([mesh.shape.get(axis, 1) for axis in RULES["batch"]]))
    if sequences % number:
        raise MeshError(
            f"the mesh cuts a batch into {number} parts, which does not divide the "
            f"{sequences} sequences of one (batch / accumulate)"
        )


def collect(params: Any) -> Any:
    """All of a model's parameters, on the host; every process takes part."""
    if jax.process_count() == 1:
        return params
    return multihost_utils.process_allgather(params, tiled=True)


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def wait(what: str) -> None:
    """Waits until all processes have come here."""
    multihost_utils.sync_global_devices(what)


def any_of(flag: bool) -> bool:
    """Whether the flag of any process is set, so that all do the same."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())
