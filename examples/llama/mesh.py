"""Several devices: the mesh, and how a run's arrays are sharded over it.

"data" and "fsdp" shard the sequences of a batch. "fsdp" also shards the parameters,
their gradients and the optimizer's moments; a layer then gathers its weights as INT8
codes. "tensor" shards the heads and the width of the MLP, or the experts. `PARAMETERS`
and `RULES` decide the sharding, and XLA inserts the collectives.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import SingleDeviceSharding as OneDevice

from examples.llama.errors import UserError

Names = tuple[str | None, ...]  # the logical axes of an array
AXES = ("data", "fsdp", "tensor")

# The logical axes of each parameter, by the last names of its path; the first that fits
# counts. `nn.scan` puts the layers before them. Other parameters are replicated.
PARAMETERS: dict[tuple[str, ...], tuple[str | None, ...]] = {
    ("experts", "gate_up", "kernel"): ("expert", "embed", None),
    ("experts", "down", "kernel"): ("expert", None, "embed"),
    ("embed", "embedding"): ("vocab", "embed"),
    ("dense", "kernel"): ("embed", "heads"),
    ("dense", "bias"): ("heads",),
    ("out", "kernel"): ("heads", "embed"),
    ("gate_up", "kernel"): ("embed", None, "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
    ("lm_head", "kernel"): ("embed", "vocab"),
}
# The mesh axes that shard each logical axis.
RULES = {"batch": ("data", "fsdp"), "replica": ("data",), "embed": ("fsdp",)}
RULES |= dict.fromkeys(("heads", "mlp", "expert", "vocab"), ("tensor",))

# The options that select devices and processes.
PARSER = argparse.ArgumentParser(add_help=False)
_HELP = "devices along each axis, such as data=2,fsdp=2,tensor=2, or a subset"
PARSER.add_argument("--mesh", default="", help=_HELP)
_HELP = "run as process I of N, with host:port of the first process; on a cluster that "
_HELP += "JAX detects, such as Slurm, without a value"
PARSER.add_argument("--hosts", nargs="?", const="", metavar="ADDRESS,N,I", help=_HELP)


def join(argv: Sequence[str]) -> None:
    """Connects to the other processes if `argv` contains --hosts.

    Call it before JAX initializes its devices. Raises UserError if it cannot connect.
    """
    hosts = PARSER.parse_known_args(argv)[0].hosts
    if hosts is None:
        return
    try:
        if hosts:
            address, count, index = hosts.split(",")
            jax.distributed.initialize(address, int(count), int(index))
        else:
            jax.distributed.initialize()
    except ValueError as error:
        raise UserError(
            "hosts takes host:port, the number of processes and the index of this one, "
            f"or no value on a cluster that JAX detects; got {hosts!r} ({error})"
        ) from error


def make(text: str) -> Mesh | None:
    """Builds the mesh that --mesh describes, such as ``"data=2,fsdp=4"``.

    No text stands for one device, None.
    """
    processes, devices = jax.process_count(), jax.devices()
    if not text:
        if processes > 1:
            raise UserError("several processes need a --mesh of all their devices")
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or not int(size):
            example = f"{', '.join(AXES)}, such as data=2,fsdp=4"
            raise UserError(f"mesh takes sizes for {example}; got {text!r}")
        sizes[name] = int(size)
    needed = math.prod(sizes.values())
    if needed > len(devices) or (processes > 1 and needed < len(devices)):
        message = f"mesh {text} needs {needed} devices, got {len(devices)}"
        if devices[0].platform == "cpu" and processes == 1:
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            message += f"; to try it on a CPU, set {flag}"
        raise UserError(message)
    shape, names, types = (*sizes.values(),), (*sizes,), (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(shape, names, axis_types=types, devices=devices[:needed])


def use(devices: Mesh | None) -> AbstractContextManager[Any]:
    """Returns a context in which computations run on a mesh, or on one device."""
    return nullcontext() if devices is None else jax.set_mesh(devices)


def spec(shape: Sequence[int], names: Sequence[str | None]) -> PartitionSpec:
    """Returns the partition of an array with logical axes, keys of `RULES` or None.

    An axis whose size is not a multiple of its devices is replicated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    found: list[tuple[str, ...] | None] = []
    for size, name in zip(shape, names, strict=True):
        axes = tuple(axis for axis in RULES.get(name or "", ()) if axis in mesh.shape)
        found.append(axes if axes and size % shards(name) == 0 else None)
    return PartitionSpec(*found)


def on_shards(
    run: Callable[..., Any], in_names: Sequence[Names], out_names: Names
) -> Callable[..., Any]:
    """Returns a function that runs on each device's part of arrays with these axes."""

    def call(*operands: jax.Array) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return run(*operands)
        specs = tuple(map(spec, (x.shape for x in operands), in_names))
        out = spec(jax.eval_shape(run, *operands).shape, out_names)
        run_shard = jax.shard_map(run, in_specs=specs, out_specs=out, check_vma=False)
        return run_shard(*operands)

    return call


def shards(name: str | None) -> int:
    """Returns how many shards a logical axis has over the mesh in use."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in RULES.get(name or "", ()))


def specs(state: Any) -> Any:
    """Returns the partition of each array, or shape, of a training state."""

    def partition(path: Sequence[Any], array: Any) -> PartitionSpec:
        found = tuple(getattr(key, "key", getattr(key, "name", None)) for key in path)
        if found[-1] == "values":  # of a moment in FP8, which is sharded as its weight
            found = found[:-1]
        are_codes = "fallback_codes" in found
        if are_codes:  # as their kernel is
            found, layout = (*found[: found.index("dot_general")], "kernel"), found
        ends = (names for end, names in PARAMETERS.items() if found[-len(end) :] == end)
        names = next(ends, ())
        if are_codes and names:  # of one matrix, or of one for each expert
            names = names if names[0] == "expert" else (None, names[0], names[-1])
            names = (names[0], *names[:0:-1]) if "colwise" in layout else names
        return spec(array.shape, (None,) * (array.ndim - len(names)) + names)

    return jax.tree.map_with_path(partition, state)


def shardings(state: Any) -> Any:
    """Returns the sharding of each array of a training state on the devices in use."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.tree.map(lambda _: OneDevice(jax.devices()[0]), state)
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs(state))


def constrain(x: Any, *names: str | None) -> Any:
    """Constrains the sharding of an array with logical axes, or of a training state."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    partition = spec(x.shape, names) if names else specs(x)
    return jax.lax.with_sharding_constraint(x, partition)


def distribute(tokens: np.ndarray, *names: str | None) -> Any:
    """Puts a batch with logical axes on the devices; every process holds all of it."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return tokens
    sharding = NamedSharding(mesh, spec(tokens.shape, names))
    return jax.make_array_from_callback(tokens.shape, sharding, lambda i: tokens[i])


def size() -> int:
    """Returns the number of devices in use."""
    return max(1, jax.sharding.get_abstract_mesh().size)


def check_batch(sequences: int) -> None:
    """Raises UserError if the mesh in use does not divide a batch."""
    if sequences % (count := shards("batch")):
        what = f"which does not divide the {sequences} sequences of a microbatch"
        raise UserError(f"the mesh splits a batch into {count} shards, {what}")


def collect(params: Any) -> Any:
    """Gathers all parameters of a model on the host; every process must call it."""
    if jax.process_count() == 1:
        return params
    return multihost_utils.process_allgather(params, tiled=True)


def is_first() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def wait(name: str) -> None:
    """Waits until all processes reach the barrier of this name."""
    multihost_utils.sync_global_devices(name)


def from_first(number: int) -> int:
    """Returns the first process's number; the same value in all processes."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def any_of(flag: bool) -> bool:
    """Whether any process has set its flag; the same value in all processes."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())
