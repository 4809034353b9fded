"""The cycles of programs compiled for TPUs, as far as their compiler tells them.

XLA estimates the cycles of its own operations.  Of a Pallas kernel the compiler dumps
the *bundles*, the instructions that are issued together, one a cycle unless the kernel
waits: their number, times that of the iterations, is a lower bound of its cycles.  The
dump of a program with all its kernels takes long, so another process compiles and
dumps the kernels alone.
"""

import contextlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from fbq_jax.bench.estimate import FALLBACK_RATE
from fbq_jax.kernels.tpu import gemm
from fbq_jax.kernels.tpu.tiles import LANES

# By the name of a generation, the smallest topology with it.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# The cores of a device, which share the programs of a kernel. XLA counts them itself.
CORES = {"v5e": 1, "v5p": 2, "v6e": 1}
_NO_ESTIMATE = 2**63 - 1  # of XLA, for some small operations
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = re.compile(
    r"%([a-z_]+)(\.\d+) = \(?\w+\[([\d,]*)\].*? custom-call\(([^)]*)\), "
    r'custom_call_target="tpu_custom_call"'
)


class Call(NamedTuple):
    """A call of a Pallas kernel, as it is traced.

    Attributes:
      name: the name of the kernel.
      operands: the number of its arrays.
      out: the shape of its first output.
      iterations: of each depth of loops, from the grid's on, the number in the call.
      program: calls the kernel.
      arguments: the shapes and dtypes of its arguments.
    """

    name: str
    operands: int
    out: tuple[int, ...]
    iterations: tuple[float, ...]
    program: Callable[..., Any]
    arguments: tuple[Any, ...]


class Issued(NamedTuple):
    """The bundles that a kernel issues in a call.

    Attributes:
      name: the name of the kernel.
      operands: the number of its arrays.
      out: the shape of its first output.
      bundles: their number.
    """

    name: str
    operands: int
    out: tuple[int, ...]
    bundles: float


class Cycles(NamedTuple):
    """The estimated cycles of a program.

    Attributes:
      xla_cycles: of XLA's operations.
      kernel_cycles: of Pallas kernels, by their name in the program.
      loop_cycles: of both, those in loops.
    """

    xla_cycles: int
    kernel_cycles: dict[str, float]
    loop_cycles: float


class Source(NamedTuple):
    """A jitted function and its arguments, which another process can make, too.

    Attributes:
      module: a module.
      name: a function in it, which returns the jitted function and a tuple of pytrees
        of the shapes and dtypes of its arguments.
      arguments: the arguments of that function, as literals.
    """

    module: str
    name: str
    arguments: tuple[Any, ...]

    def lower(self, generation: str) -> jax.stages.Lowered:
        """Lowers the function for a TPU, on which the library runs its kernels."""
        with backend_of("tpu"):
            make = getattr(importlib.import_module(self.module), self.name)
            function, arguments = make(*self.arguments)
            return lower_for(generation, function, *arguments)


def estimate(generation: str, source: Source) -> Cycles:
    """Compiles a function for a TPU, and adds up its cycles.

    Args:
      generation: a key of ``TOPOLOGIES``.
      source: makes the function.

    Raises:
      RuntimeError: if the program's loops or kernels are not understood.
    """
    hlo = source.lower(generation).compile().as_text()
    assert hlo is not None
    issued = _in_new_process(generation, source) if _KERNEL.search(hlo) else []
    return add_up(hlo, issued, CORES[generation])


def add_up(hlo: str, issued: Iterable[Issued], cores: int) -> Cycles:
    """Adds up the cycles of a compiled program.

    Args:
      hlo: the program.
      issued: the bundles of its kernels, and perhaps of others.
      cores: the cores that share a kernel.

    Raises:
      RuntimeError: if the program's loops or kernels are not understood.
    """
    computations = _computations(hlo)
    runs = _runs(computations)
    xla: dict[str, int] = {}
    kernels: dict[str, dict[str, float]] = {}
    for name, lines in computations.items():
        estimates = sum(_estimates(lines))
        called = [match.groups() for line in lines for match in _KERNEL.finditer(line)]
        if name in runs:
            xla[name] = estimates * runs[name]
            kernels[name] = {
                kernel + number: runs[name]
                * _bundles(kernel, operands.count("%"), _read_shape(out), issued)
                / cores
                for kernel, number, out, operands in called
            }
        elif estimates or called:
            raise RuntimeError(f"it is not known how often {name} runs")
    in_loops = sum(
        xla[name] + sum(kernels[name].values()) for name in runs if name != "ENTRY"
    )
    by_name = {
        name: cycles for part in kernels.values() for name, cycles in part.items()
    }
    return Cycles(sum(xla.values()), by_name, in_loops)


def _read_shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _bundles(
    name: str, operands: int, out: tuple[int, ...], issued: Iterable[Issued]
) -> float:
    """The bundles of a call; ``jax.vmap`` repeats a kernel along the leading axes."""
    for kernel in issued:
        lead = len(out) - len(kernel.out)
        if kernel[:3] == (name, operands, out[lead:]):
            return kernel.bundles * math.prod(out[:lead])
    raise RuntimeError(f"this kernel was not traced: {name} {out}")


def lower_for(generation: str, function: Any, *arguments: Any) -> jax.stages.Lowered:
    """Lowers a jitted function for one TPU of a generation, a key of ``TOPOLOGIES``."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # There is no TPU to ask.
    topology = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu")
    mesh = Mesh(topology.devices[:1], ("all",))
    everywhere = NamedSharding(mesh, P())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arguments
    )
    # Kernels ask the mesh for the generation.
    with use_abstract_mesh(mesh.abstract_mesh):
        lowered: jax.stages.Lowered = function.lower(*placed)
    return lowered


def backend_of(platform: str) -> Any:
    """A context in which the library chooses kernels as on this platform."""
    return mock.patch.object(jax, "default_backend", return_value=platform)


@contextlib.contextmanager
def _recorded(calls: list[Call]) -> Iterator[None]:
    """Records the calls of Pallas kernels that are traced in this context."""
    original = pl.pallas_call

    def pallas_call(kernel: Any, **options: Any) -> Any:
        program = original(kernel, **options)

        def run(*args: Any) -> Any:
            name, (out, *_) = options["name"], jax.tree.leaves(options["out_shape"])
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args
            )
            number = len(jax.tree.leaves(args))
            iterations = _iterations(options)
            calls.append(Call(name, number, out.shape, iterations, program, shapes))
            return program(*args)

        return run

    with mock.patch.object(pl, "pallas_call", pallas_call):
        yield


def _iterations(options: Mapping[str, Any]) -> tuple[float, ...]:
    """The iterations of a kernel's grid, of the loop in it, and of the loop in that."""
    if options["name"].startswith("splash"):
        # JAX's attention skips the blocks of scores that a causal mask hides.
        heads, *blocks = options["grid_spec"].grid
        return (heads * (math.prod(blocks) + max(blocks)) / 2,)
    if options["name"] == "fbq_matmul":
        return _iterations_of_gemm(options["grid_spec"])
    programs = math.prod(options["grid"])
    if options["name"] == "fbq_quantize":
        return programs, programs * options["scratch_shapes"][0].shape[0]
    (of_x,) = options["in_specs"]
    of_x = of_x["x"] if isinstance(of_x, dict) else of_x
    return programs, programs * (of_x.block_shape[2] // LANES)


def _iterations_of_gemm(grid_spec: Any) -> tuple[float, ...]:
    programs = math.prod(grid_spec.grid)
    rows = grid_spec.scratch_shapes[0].shape[0] // gemm.ROWS
    blocks = grid_spec.in_specs[-1].block_shape[2]
    terms = len(grid_spec.in_specs[1])
    steps = blocks * (1 + FALLBACK_RATE) if terms == 2 else blocks
    groups = math.ceil(steps / gemm.GROUP)
    return programs, programs * rows, programs * rows * groups


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation of a program; the first one of all is ``ENTRY``."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            lines = computations.setdefault("ENTRY" if head[1] else head[2], [])
        else:
            lines.append(line)
    return computations


def _runs(computations: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """How often each computation runs that is not part of an operation."""
    runs = {"ENTRY": 1}
    waiting = ["ENTRY"]
    for name in waiting:
        for line in computations[name]:
            loop = re.search(r" while\(.*condition=%([^\s,]+).*body=%([^\s,]+)", line)
            if loop is None:
                continue
            condition, body = loop.groups()
            (trips,) = re.findall(
                r" constant\((\d+)\)", "\n".join(computations[condition])
            )
            runs[body] = runs.get(body, 0) + runs[name] * int(trips)
            waiting.append(body)
    return runs


def _estimates(lines: Iterable[str]) -> Iterator[int]:
    for line in lines:
        if (found := _ESTIMATE.search(line)) and int(found[1]) < _NO_ESTIMATE:
            yield int(found[1])


def _in_new_process(generation: str, source: Source) -> list[Issued]:
    """Dumps in a process of its own: the compiler reads its options at the start."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": (
                f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
            ),
            # The process that waits has the compiler loaded.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        arguments = f"{generation!r}, {tuple(source)!r}, {folder!r}"
        program = f"from {__name__} import dump; print(dump({arguments}))"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"a process that compiles failed: {program}\n{done.stderr}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return [Issued(name, n, tuple(out), bundles) for name, n, out, bundles in rows]


def dump(generation: str, source: tuple[Any, ...], folder: str) -> str:
    """Compiles the kernels that a ``Source`` traces; returns ``Issued``s in JSON.

    Args:
      generation: a key of ``TOPOLOGIES``.
      source: the fields of the ``Source``.
      folder: where the compiler dumps.
    """
    calls: list[Call] = []
    with _recorded(calls):
        Source(*source).lower(generation)
    issued = []
    for call in {call[:3]: call for call in calls}.values():
        before = set(Path(folder).glob("*-final_bundles.txt"))
        lower_for(generation, jax.jit(call.program), *call.arguments).compile()
        new = set(Path(folder).glob("*-final_bundles.txt")) - before
        (file,) = (
            file
            for file in new
            if re.search(rf"-{call.name}\.\d+-\d+-final_bundles", file.name)
        )
        bundles = count_bundles(file.read_text(), call.iterations)
        issued.append(Issued(*call[:3], bundles))
    return json.dumps(issued)


def count_bundles(text: str, iterations: tuple[float, ...]) -> float:
    """The bundles that a dumped kernel issues: of each depth, times its iterations."""
    bundle = r"^\s*(?:0x)?[0-9a-f]+\s.*?:\s*(>*)"
    depths = re.findall(bundle, text, re.M)
    return sum((1, *iterations)[len(depth)] for depth in depths)
