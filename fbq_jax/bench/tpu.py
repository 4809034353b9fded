"""Layers compiled for TPUs, and what their compiled programs say of their time.

``python -m fbq_jax.bench compile-tpu`` writes the file. It needs libtpu, but no TPU.

XLA estimates the cycles of its own operations. Of a Pallas kernel the compiler dumps
the *bundles*, the instructions that are issued together, one a cycle unless the kernel
waits: their number, times that of the iterations, is a lower bound of its cycles.
"""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from fbq_jax import recipes
from fbq_jax.bench import compiled, matmuls, results, tpu_meshes
from fbq_jax.bench.estimate import FALLBACK_RATE
from fbq_jax.kernels.tpu import gemm
from fbq_jax.kernels.tpu.tiles import LANES
from fbq_jax.recipes.schema import Recipe

DEFAULT_PATH = Path("bench-compiled-tpu.json")
# By the name of a generation, the smallest topology with it.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# The cores of a device, which share the programs of a kernel. XLA counts them itself.
CORES = {"v5e": 1, "v5p": 2, "v6e": 1}
_NO_ESTIMATE = 2**63 - 1  # of XLA, for some small operations
LAYERS = ((8192, 4096, 4096),)  # (M, K, N)
_HLO = "layer.hlo"


def named_recipes() -> dict[str, Recipe | None]:
    """The recipes to compile; None is bf16."""
    wide = Recipe(block=256)
    return {
        "bf16": None,
        "rowwise": recipes.rowwise,
        "block": recipes.block,
        "fallback": recipes.fallback,
        "fallback, blocks of 256": wide,
    }


class Call(NamedTuple):
    """A call of a Pallas kernel, as it is traced.

    Attributes:
      name: the name of the kernel.
      operands: the number of its arrays.
      out: the shape of its first output.
      iterations: of each depth of loops, from the grid's on, the number in the call.
    """

    name: str
    operands: int
    out: tuple[int, ...]
    iterations: tuple[float, ...]


def run(path: Path) -> None:
    """Compiles all layers for all generations, and writes the file.

    Raises:
      ModuleNotFoundError: if libtpu is not installed.
      ResultsError: if the file cannot be written.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("compiling for TPUs needs libtpu: pip install libtpu")
    results.check_folder(path)
    rows = []
    for generation in TOPOLOGIES:
        for shape in LAYERS:
            for name in named_recipes():
                print(f"compiling {name} for {generation}", flush=True)
                rows.append(_row(generation, name, shape))
    meshes = []
    for generation, sizes, name in tpu_meshes.cases():
        print(f"compiling {name} for eight {generation}, {sizes}", flush=True)
        with backend_of("tpu"):
            meshes.append(tpu_meshes.row(generation, sizes, name))
    content = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": results.versions()
        | {"libtpu": importlib.metadata.version("libtpu")},
        "tpu_layers": rows,
        "tpu_meshes": meshes,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _row(generation: str, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Compiles a layer in a process of its own, which dumps what the compiler did."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": options,
        }
        arguments = f"{generation!r}, {name!r}, {shape}, {folder!r}"
        program = f"from {__name__} import dump; print(dump({arguments}))"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(
                f"a process that compiles failed: {program}\n{done.stderr}"
            )
        calls = [
            Call(name, operands, tuple(out), tuple(iterations))
            for name, operands, out, iterations in json.loads(
                done.stdout.splitlines()[-1]
            )
        ]
        hlo = Path(folder, _HLO).read_text()
        kernels = _cycles_of_kernels(Path(folder), dict(_compiled_calls(hlo, calls)))
    estimates = map(int, re.findall(r'"estimated_cycles":"(\d+)"', hlo))
    return {
        "generation": generation,
        "what": name,
        "shape": shape,
        "xla_cycles": sum(cycles for cycles in estimates if cycles < _NO_ESTIMATE),
        "kernel_cycles": {
            kernel: cycles / CORES[generation] for kernel, cycles in kernels.items()
        },
    }


def dump(generation: str, name: str, shape: tuple[int, int, int], folder: str) -> str:
    """Compiles a layer, writes its HLO, and returns its ``Call``s in JSON."""
    calls: list[Call] = []
    with _recorded(calls), backend_of("tpu"):
        text = _compiled(generation, named_recipes()[name], shape)
    Path(folder, _HLO).write_text(text)
    return json.dumps(calls)


def _compiled(
    generation: str, recipe: Recipe | None, shape: tuple[int, int, int]
) -> str:
    """The HLO of a layer's output and gradients; the weight is float32."""
    M, K, N = shape
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((K, N), jnp.float32)
    dy = jax.ShapeDtypeStruct((M, N), jnp.bfloat16)
    return compile_for(generation, matmuls.all_products(recipe), x, w, dy)


def compile_for(
    generation: str, function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct
) -> str:
    """Compiles a function for a TPU.

    Args:
      generation: a key of ``TOPOLOGIES``.
      function: takes arrays.
      *shapes: the shapes and dtypes of the arrays.

    Returns:
      The HLO of the compiled function.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # There is no TPU to ask.
    topology = topologies.get_topology_desc(TOPOLOGIES[generation], "tpu")
    mesh = Mesh(topology.devices[:1], ("all",))
    everywhere = NamedSharding(mesh, P())
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in shapes
    ]
    # Kernels ask the mesh for the generation.
    with use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return text


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
            number = len(jax.tree.leaves(args))
            calls.append(Call(name, number, out.shape, _iterations(options)))
            return program(*args)

        return run

    with mock.patch.object(pl, "pallas_call", pallas_call):
        yield


def _iterations(options: Mapping[str, Any]) -> tuple[float, ...]:
    """The iterations of a kernel's grid, of the loop in it, and of the loop in that."""
    programs = math.prod(options["grid"])
    if options["name"] == "fbq_quantize":
        return programs, programs * options["scratch_shapes"][0].shape[0]
    if options["name"] != "fbq_matmul":
        (of_x,) = options["in_specs"]
        of_x = of_x["x"] if isinstance(of_x, dict) else of_x
        return programs, programs * (of_x.block_shape[2] // LANES)
    rows = options["scratch_shapes"][0].shape[0] // gemm.ROWS
    blocks = options["in_specs"][-1].block_shape[2]
    terms = len(options["in_specs"][1])
    steps = blocks * (1 + FALLBACK_RATE) if terms == 2 else blocks
    groups = math.ceil(steps / gemm.GROUP)
    return programs, programs * rows, programs * rows * groups


def _compiled_calls(hlo: str, calls: Sequence[Call]) -> Iterator[tuple[str, Call]]:
    """The kernels of a program with their calls."""
    for kernel, shape, arguments in re.findall(
        r"%((?:fbq_\w+)\.\d+) = \(?\w+\[([\d,]*)\].*? custom-call\(([^)]*)\)", hlo
    ):
        out = tuple(map(int, shape.split(",")))
        key = kernel.partition(".")[0], arguments.count("%"), out
        yield (
            kernel,
            next(call for call in calls if call[:3] == key),
        )


def _cycles_of_kernels(folder: Path, calls: Mapping[str, Call]) -> dict[str, float]:
    """Bundles of each depth of loops times their iterations, for each kernel."""
    cycles: dict[Call, float] = {}  # equal kernels are compiled once
    for kernel, call in calls.items():
        for file in folder.glob(f"*-{kernel}-[0-9]*[0-9]-final_bundles.txt"):
            bundle = r"^\s*(?:0x)?[0-9a-f]+\s.*?:\s*(>*)"
            depths = re.findall(bundle, file.read_text(), re.M)
            iterations = 1, *call.iterations
            cycles[call] = sum(iterations[len(depth)] for depth in depths)
    return {kernel: cycles[call] for kernel, call in calls.items()}


def load(path: Path) -> dict[str, Any] | None:
    """The content of a file that ``run`` wrote; None if it holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(content, dict) and "tpu_layers" in content
    return content if is_ours else None


def markdown(content: Mapping[str, Any]) -> str:
    """The tables of a file, in Markdown."""
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    text = (
        "**Estimate, not a measurement: a linear layer on TPUs, forward and "
        f"backward**, compiled on {content['date']} with {versions}. No TPU has run "
        "it. Cycles of XLA's operations are its own estimates, which it has of all but "
        "a small sort. Those of kernels are the instruction bundles that they issue, "
        "without waits, divided by the cores of a device. A fifth of X's blocks fall "
        "back. In bf16, XLA casts the weight in both products that read it."
    )
    head = ["TPU", "recipe", "M, K, N", "XLA, cycles", "kernels, cycles", "over bf16"]
    layers = f"{text}\n\n{compiled.table(head, _cells(content['tpu_layers']))}"
    return f"{layers}\n\n{tpu_meshes.markdown(content['tpu_meshes'])}"


def _cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    bf16: dict[Any, float] = {}  # the first row of each layer
    for row in rows:
        kernels = sum(row["kernel_cycles"].values())
        total = row["xla_cycles"] + kernels
        exact = bf16.setdefault((row["generation"], tuple(row["shape"])), total)
        yield [
            row["generation"],
            row["what"],
            ", ".join(map(str, row["shape"])),
            f"{row['xla_cycles']:.3g}",
            f"{kernels:.3g}",
            f"{total / exact:.2f}",
        ]
